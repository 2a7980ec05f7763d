"""A tiny vision-language model learns to count, from random weights, in minutes on two CPU cores: `make vlm`.

A LLaVA of 0.3 million parameters is built. From answers most of which are wrong it learns that an answer is a digit
(SFT), and from a rule that checks its sampled answers it learns to count (GRPO); its vision tower is trained, too. It
uses the CPU, unless MESHRL_DEVICE is set. The output goes to runs/vlm/seed_N; examples/guided_run.py describes the
numbers of report.json.

Two controls: `--shuffle-rewards` permutes the rewards of each batch at random (its folder is control_N), and
`--freeze` does not train the tower. In each run, an evaluation asks the held-out questions with one black image.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from examples.guided_run import (  # noqa: E402 - found by the line above
    before_and_after,
    choose_device,
    exit_code,
    main_of,
    make_folder,
    parser,
    peak_memory,
    print_heading,
    run,
    show_rows,
    train,
    write_result,
)

MIN_ACCURACY = 0.85  # held-out accuracy that the run must reach
MAX_CONTROL_ACCURACY = 0.50  # held-out accuracy that the control must not exceed

SMOKE_SFT = ("sft.num_steps=2", "train.scheduler.warmup_steps=0")
SMOKE_GRPO = ("loop.num_steps=2", "loop.prompts_per_step=4", "data.eval_limit=16", "train.scheduler.warmup_steps=0")
SETS = ("heldout", "sampled", "blank")  # greedy answers, answers at temperature 1, and with a black image


def main() -> int:
    options = parser(__doc__, "vlm", "the weights, the order of the rows and the sampling")
    options.add_argument("--freeze", action="store_true", help="do not train the vision tower in the RL")
    args = options.parse_args()
    place = make_folder(args, ("start", "sft", "grpo"))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    choose_device("vlm", "two GPUs")
    began = time.monotonic()
    with peak_memory() as memory:
        start, sft, grpo = place / "start", place / "sft", place / "grpo"
        run_settings = [f"run.folder={place}", f"run.seed={args.seed}"]

        print_heading("1/4", "Build a tiny LLaVA with random weights, and draw squares and discs in three colours.")
        run([HERE / "task.py", "--out", start, "--seed", args.seed])
        show_rows(start, ("warmup", "train", "heldout", "blank"))

        print_heading("2/4", "Warm up with answers most of which are wrong: they show the form of an answer.")
        settings = [*run_settings, "run.name=sft", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
        run(["-m", "meshrl", "sft", HERE / "sft.yaml", *settings, *(SMOKE_SFT if args.smoke else ())])
        (warm,) = sft.glob("checkpoints/step_*/model")

        print_heading("3/4", "Learn: sample answers about images, check them by a rule, make right ones likelier.")
        settings = [*run_settings, f"model.path={warm}", f"data.path={start}/train.jsonl"]
        files = zip(SETS, ("heldout", "heldout", "blank"), strict=True)
        settings += [f"data.eval_sets.{name}.path={start}/{file}.jsonl" for name, file in files]
        settings += ["model.vision=freeze"] if args.freeze else []
        result = train(args, HERE / "grpo.yaml", settings, SMOKE_GRPO)
        pairs = before_and_after(grpo, result)

    print_heading("4/4", "The result.")
    scores = of_sets(grpo)
    accuracy = write_result(args, place, result, pairs, began, memory, scores)
    return exit_code(args, accuracy, MIN_ACCURACY, MAX_CONTROL_ACCURACY, grpo)


def of_sets(grpo: Path) -> dict[str, tuple[float, float]]:
    """The accuracies of each held-out set, before and after the training."""
    lines = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    evals = [line["metrics"] for line in lines if "eval/by/heldout/mean_at_k" in line.get("metrics", {})]
    return {name: (evals[0][key], evals[-1][key]) for name in SETS for key in [f"eval/by/{name}/mean_at_k"]}


if __name__ == "__main__":
    main_of(main)
