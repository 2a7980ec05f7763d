"""SFT and GRPO of a tiny model, from random weights, in minutes on two CPU cores: `make quickstart`, or without a clone
`meshrl quickstart`. It uses the CPU on every machine, unless MESHRL_DEVICE is set.

A tiny Qwen2 model is built, learns from demonstrations to double numbers without carrying, and then learns to carry
only from a rule that checks its answers (GRPO). The output goes to runs/quickstart/seed_N, a folder for each seed. Of
this folder, the next call with the same seed replaces what this script makes: start, sft, grpo and report.json, whose
numbers examples/guided_run.py describes.

`--shuffle-rewards` is the control experiment: the same run, but the rewards of each batch are permuted at random; its
folder is control_N.
"""

from __future__ import annotations

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
    print_greedy_answers,
    print_heading,
    run,
    show_rows,
    train,
    write_result,
)

MIN_ACCURACY = 0.90  # held-out accuracy that the run must reach
MAX_CONTROL_ACCURACY = 0.45  # held-out accuracy that the control must not exceed

SMOKE_SFT = ("sft.num_steps=3", "train.scheduler.warmup_steps=0")
SMOKE_GRPO = ("loop.num_steps=2", "loop.prompts_per_step=4", "data.eval_limit=16", "train.scheduler.warmup_steps=0")


def main() -> int:
    args = parser(__doc__, "quickstart", "the weights, the demonstrations' mistakes and the sampling").parse_args()
    place = make_folder(args, ("start", "sft", "grpo"))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # not needed for 26 tensors
    choose_device("quickstart", "two GPUs")
    began = time.monotonic()
    with peak_memory() as memory:
        start, sft, grpo = place / "start", place / "sft", place / "grpo"
        run_settings = [f"run.folder={place}", f"run.seed={args.seed}"]

        print_heading("1/5", "Build a tiny Qwen2 model with random weights, its tokenizer, and three sets of problems.")
        run([HERE / "task.py", "--out", start, "--seed", args.seed])
        show_rows(start, ("warmup", "train", "heldout"))

        print_heading("2/5", "Warm up: imitate demonstrations; most forget to carry (supervised, two FSDP2 ranks).")
        settings = [*run_settings, "run.name=sft", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
        run(["-m", "meshrl", "sft", HERE / "sft.yaml", *settings, *(SMOKE_SFT if args.smoke else ())])
        (warm,) = sft.glob("checkpoints/step_*/model")

        print_heading("3/5", "Learn: sample answers, check them by a rule, make right ones likelier (GRPO, two ranks).")
        print("  The reward is for answers sampled at temperature 1. Held-out answers are greedy: at first they")
        print("  repeat the mistake of most demonstrations.\n")
        settings = [*run_settings, f"model.path={warm}"]
        settings += [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"]
        result = train(args, HERE / "grpo.yaml", settings, SMOKE_GRPO)

        load = f"AutoModelForCausalLM.from_pretrained({result['model']!r})"
        print_heading("4/5", f"Load the result like any Transformers model: {load}")
        pairs = before_and_after(grpo, result)
        print_greedy_answers(result["model"], pairs, max_new_tokens=8)

    print_heading("5/5", "The result.")
    accuracy = write_result(args, place, result, pairs, began, memory)
    return exit_code(args, accuracy, MIN_ACCURACY, MAX_CONTROL_ACCURACY, grpo)


if __name__ == "__main__":
    main_of(main)
