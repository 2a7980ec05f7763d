"""SFT and GRPO of a tiny model, from random weights, in minutes on two CPU cores: `make quickstart`. It uses the CPU on
every machine, unless MESHRL_DEVICE is set.

A tiny Qwen2 model is built, learns from demonstrations to double numbers without carrying, and then learns to carry
only from a rule that checks its answers (GRPO). The output goes to runs/quickstart/seed_N, a folder for each seed. Of
this folder, the next call with the same seed replaces what this script makes: start, sft, grpo and report.json, which
has the numbers:

    seed, steps
    eval_before, eval_after   share of right greedy answers to held-out problems, before and after the RL
    reward_curve              mean reward of each training step
    wall_s, cpu_s             of the entire quickstart, without the installation
    peak_rss_bytes            largest sum of resident sizes over the process tree, sampled five times a second; shared
                              pages count in each process, so the memory in use was less
    model                     the trained model's folder, relative to this checkout

`--shuffle-rewards` is the control experiment: the same run, but the rewards of each batch are permuted at random; its
folder is control_N.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrl.core.types import Trajectory
from meshrl.monitor.curve import text_curve
from meshrl.monitor.memory import memory_metrics
from meshrl.monitor.rollout_log import read_rollouts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARKER = ".quickstart"  # a file in the folders that this script has made
PARTS = ("start", "sft", "grpo", "report.json")  # in each of these folders; a later call replaces them
MIN_ACCURACY = 0.90  # held-out accuracy that the run must reach
MAX_CONTROL_ACCURACY = 0.45  # held-out accuracy that the control must not exceed
STOP_TIMEOUT_S = 10.0  # a running part has this time to end by itself after Ctrl-C

SMOKE_SFT = ("sft.num_steps=3", "train.scheduler.warmup_steps=0")
SMOKE_GRPO = ("loop.num_steps=2", "loop.prompts_per_step=4", "data.eval_limit=16", "train.scheduler.warmup_steps=0")


def main() -> int:
    args = parse()
    out = args.out.resolve() / f"{'control' if args.shuffle_rewards else 'seed'}_{args.seed}"
    make_folder(out)
    place = Path(os.path.relpath(out, ROOT)) if out.is_relative_to(ROOT) else out
    os.chdir(ROOT)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # not needed for 26 tensors
    choose_device()
    began = time.monotonic()
    with peak_memory() as memory:
        start, sft, grpo = place / "start", place / "sft", place / "grpo"
        run_settings = [f"run.folder={place}", f"run.seed={args.seed}"]

        print_heading(1, "Build a tiny Qwen2 model with random weights, its tokenizer, and three sets of problems.")
        run([HERE / "task.py", "--out", start, "--seed", args.seed])
        show_rows(start)

        print_heading(2, "Warm up: imitate demonstrations; most forget to carry (supervised, two FSDP2 ranks).")
        settings = [*run_settings, "run.name=sft", f"model.path={start}", f"sft.path={start}/warmup.jsonl"]
        run(["-m", "meshrl", "sft", HERE / "sft.yaml", *settings, *(SMOKE_SFT if args.smoke else ())])
        warm = only_model(sft)

        print_heading(3, "Learn: sample answers, check them by a rule, make right ones likelier (GRPO, two ranks).")
        print("  The reward is for answers sampled at temperature 1. Held-out answers are greedy: at first they")
        print("  repeat the mistake of most demonstrations.\n")
        how = [HERE / "shuffled_rewards.py"] if args.shuffle_rewards else ["-m", "meshrl", "train"]
        settings = [*run_settings, "run.name=grpo", f"model.path={warm}"]
        settings += [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"]
        run([*how, HERE / "grpo.yaml", *settings, *(SMOKE_GRPO if args.smoke else ())])
        result = json.loads((grpo / "result.json").read_text())

        load = f"AutoModelForCausalLM.from_pretrained({result['model']!r})"
        print_heading(4, f"Load the result like any Transformers model: {load}")
        before, after = (list(read_rollouts(grpo / "rollouts" / f"eval_{n:06d}.jsonl")) for n in (0, result["steps"]))
        pairs = [(old.trajectory, new.trajectory) for old, new in zip(before, after, strict=True)]
        # Answers that were wrong before the training and are right after it come first.
        pairs.sort(key=lambda pair: (pair[0].reward or 0) - (pair[1].reward or 0))
        print_greedy_answers(result["model"], pairs[:3])

    report = {
        "seed": args.seed,
        "eval_before": result["evals"][0]["mean_at_k"],
        "eval_after": result["evals"][-1]["mean_at_k"],
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(sum(os.times()[:4]), 1),
        "peak_rss_bytes": memory[0],
        "steps": result["steps"],
        "reward_curve": result["reward_curve"],
        "model": result["model"],
    }
    print_heading(5, "The result.")
    print_result(report, pairs[:3], grpo / "reward.png")
    (place / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"page about the run     {grpo / 'report.html'}")
    print(f"these numbers          {place / 'report.json'}")
    return exit_code(args, report["eval_after"], grpo)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, default=0, help="for the weights, the demonstrations' mistakes and the sampling"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart", help="folder of the seeds' folders")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to test that every part runs; nothing is learned"
    )
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: randomly permuted rewards")
    return parser.parse_args()


def choose_device() -> None:
    """The CPU, which is fast enough for this model: its two ranks would need two GPUs."""
    if not os.environ.get("MESHRL_DEVICE"):
        os.environ["MESHRL_DEVICE"] = "cpu"
        print("The quickstart uses the CPU. On a machine with two GPUs, MESHRL_DEVICE=cuda make quickstart uses them.")


def make_folder(out: Path) -> None:
    """Make the folder of a seed. Only what an earlier quickstart made in it is removed. A folder that the quickstart
    did not make is an error."""
    if out.exists() and not (out / MARKER).is_file() and any(out.iterdir()):
        sys.exit(f"quickstart: {out} exists and was not made by the quickstart; move it, or give another --out")
    for path in (out / name for name in PARTS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    text = f"Made by examples/quickstart/quickstart.py; its next call with this seed replaces {', '.join(PARTS)}."
    (out / MARKER).write_text(f"{text}\n")


def print_heading(number: int, text: str) -> None:
    print(f"\n[{number}/5] {text}\n", flush=True)


def run(arguments: list[Any]) -> None:
    """Run one Python command to its end; its output goes to ours. None of its processes outlives this process."""
    words = [os.path.relpath(a, ROOT) if isinstance(a, Path) and a.is_relative_to(ROOT) else str(a) for a in arguments]
    print("$ " + " ".join(["python", *words]).replace("python -m meshrl", "meshrl"), flush=True)
    began, cpu = time.monotonic(), os.times()
    process = subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL)
    try:
        code = process.wait()
    except BaseException as error:  # the command ends its own ranks when it gets a signal
        if not isinstance(error, KeyboardInterrupt):  # the terminal sends Ctrl-C to the command, too
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if code:
        sys.exit(f"quickstart: the command above ended with exit code {code}; its last lines state the reason")
    used = os.times()
    cpu_s = used.children_user + used.children_system - cpu.children_user - cpu.children_system
    print(f"  (took {time.monotonic() - began:.0f} s, {cpu_s:.0f} s of CPU)", flush=True)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields [bytes]: the largest sum so far of the resident sizes of this process and its descendants."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], int(next(m.sum for m in memory_metrics() if m.name == "memory/rss_bytes")))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def show_rows(start: Path) -> None:
    for name in ("warmup", "train", "heldout"):
        lines = (start / f"{name}.jsonl").read_text().splitlines()
        print(f"  {name + '.jsonl':<14} {len(lines):>6} rows, such as {lines[0]}")


def only_model(run_folder: Path) -> Path:
    (folder,) = run_folder.glob("checkpoints/step_*/model")
    return folder


def print_greedy_answers(folder: str, pairs: list[tuple[Trajectory, Trajectory]]) -> None:
    """Print greedy answers by plain Transformers: the saved model does not need meshrl."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    print(f"  {type(model).__name__}, {model.num_parameters():,} parameters; answers by model.generate:")
    for _, new in pairs:
        inputs = tokenizer.apply_chat_template(
            new.prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
        print(f"  {question(new)} = {tokenizer.decode(tokens, skip_special_tokens=True)}")


def question(trajectory: Trajectory) -> str:
    return str(trajectory.prompt.messages[-1]["content"])


def answer(trajectory: Trajectory) -> str:
    return str(trajectory.turns[-1].messages[-1]["content"])


def print_result(report: dict[str, Any], pairs: list[tuple[Trajectory, Trajectory]], picture: Path) -> None:
    print("  mean reward by step")
    print("  " + text_curve(report["reward_curve"]).replace("\n", "\n  "))
    print(f"\n  {'problem':<10} {'solution':>8}   {'before the RL':<16} after the RL")
    for old, new in pairs:
        before, after = (f"{answer(t)} ({'right' if t.reward else 'wrong'})" for t in (old, new))
        print(f"  {question(new):<10} {new.prompt.answer:>8}   {before:<16} {after}")
    print(f"\nheld-out accuracy      {report['eval_before']:.3f} before, {report['eval_after']:.3f} after")
    print(f"took                   {report['wall_s']:.0f} s, {report['cpu_s']:.0f} s of CPU")
    print(f"peak memory            {report['peak_rss_bytes'] / 1e9:.1f} GB in all processes together")
    print(f"model                  {report['model']}")
    print(f"reward curve           {picture}")


def exit_code(args: argparse.Namespace, accuracy: float, grpo: Path) -> int:
    """1 if the model did not learn, or if the control learned. grpo: the folder of the RL run."""
    if args.smoke:
        return 0
    if args.shuffle_rewards and accuracy > MAX_CONTROL_ACCURACY:
        text = f"quickstart: with random rewards the accuracy must be at most {MAX_CONTROL_ACCURACY}"
        print(f"{text}, but it is {accuracy:.3f}", file=sys.stderr)
        return 1
    if not args.shuffle_rewards and accuracy < MIN_ACCURACY:
        text = (
            f"quickstart: {accuracy:.3f} of the held-out answers are right after training; {MIN_ACCURACY} is required"
        )
        print(f"{text}. The reward curve and {grpo}/metrics.jsonl show where it stalled", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nquickstart: interrupted")
