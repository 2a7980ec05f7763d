"""A tiny model learns to use a tool, from random weights, in minutes on one CPU core: `make multi-turn`.

A Llama of 0.1 million parameters is built. Demonstrations show how a call of a calculator looks and how its result is
copied, but most of them guess (SFT). From a rule that checks the last answer it learns to call (GRPO). It uses the CPU,
unless MESHRL_DEVICE is set. The output goes to runs/multi_turn/seed_N; examples/guided_run.py describes the numbers of
report.json. Held-out answers are sampled at temperature 1, as in training.

`--shuffle-rewards` is a control: it permutes the rewards of each batch at random (its folder is control_N). RECIPE.md
has the commands of another control, a broken calculator, and of the same training by a program that asks a chat API.
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

MIN_ACCURACY = 0.75  # held-out accuracy that the run must reach
MAX_CONTROL_ACCURACY = 0.50  # held-out accuracy that the control must not exceed

SMOKE_SFT = ("sft.num_steps=150",)
SMOKE_GRPO = ("loop.num_steps=2", "loop.prompts_per_step=8", "data.eval_limit=32", "train.scheduler.warmup_steps=0")
SCORES = {"accuracy": "eval/mean_at_k", "right calls": "eval/reward/term/called"}


def main() -> int:
    args = parser(__doc__, "multi_turn", "the weights, the guesses and the sampling").parse_args()
    place = make_folder(args, ("start", "sft", "grpo"))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    choose_device("multi-turn", "a GPU")
    began = time.monotonic()
    with peak_memory() as memory:
        start, sft, grpo = place / "start", place / "sft", place / "grpo"
        run_settings = [f"run.folder={place}", f"run.seed={args.seed}"]

        print_heading("1/4", "Build a tiny Llama with random weights, its tokenizer, and three sets of products.")
        run([HERE / "task.py", "--out", start, "--seed", args.seed])
        show_rows(start, ("warmup", "train", "heldout"))

        print_heading("2/4", "Warm up with demonstrations: two in ten call the calculator, the others guess.")
        settings = [*run_settings, "run.name=sft", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
        run(["-m", "meshrl", "sft", HERE / "sft.yaml", *settings, *(SMOKE_SFT if args.smoke else ())])
        (warm,) = sft.glob("checkpoints/step_*/model")

        print_heading("3/4", "Learn: sample conversations with calls, check the last answer, make right ones likelier.")
        settings = [*run_settings, f"model.path={warm}"]
        settings += [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"]
        result = train(args, HERE / "grpo.yaml", settings, SMOKE_GRPO)
        pairs = before_and_after(grpo, result)

    print_heading("4/4", "The result.")
    lines = [json.loads(line).get("metrics", {}) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if "eval/mean_at_k" in line]
    scores = {name: (evals[0][metric], evals[-1][metric]) for name, metric in SCORES.items()}
    accuracy = write_result(args, place, result, pairs, began, memory, scores)
    return exit_code(args, accuracy, MIN_ACCURACY, MAX_CONTROL_ACCURACY, grpo)


if __name__ == "__main__":
    main_of(main)
