"""What `make quickstart` and `make smollm` share: their options, the commands that they run, their reports.

report.json of a seed has the numbers:

    seed, steps
    eval_before, eval_after   share of right greedy answers to held-out problems, before and after the RL
    reward_curve              mean reward of each training step
    wall_s, cpu_s             of the entire script, without the installation
    peak_bytes                largest sum of proportional set sizes (each shared page counts once) over the process
                              tree, sampled every two seconds; of resident sizes, where the system reports no others
    peak_rss_bytes            largest sum of resident sizes: pages that processes share count in each of them
    model                     the trained model's folder, relative to this checkout
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from meshrl.core.types import Trajectory
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.sinks import text_curve

EXAMPLES = Path(__file__).resolve().parent
# Else they are files of an installed wheel, or of an image, in which only the folder of the user can be written.
IS_CHECKOUT = (EXAMPLES.parent / "pyproject.toml").is_file() and os.access(EXAMPLES.parent, os.W_OK)
ROOT = EXAMPLES.parent if IS_CHECKOUT else Path.cwd()
STOP_TIMEOUT_S = 10.0  # a running part has this time to end by itself after Ctrl-C


def script_name() -> str:
    return Path(sys.argv[0]).stem


def main_of(script: Callable[[], int]) -> None:
    """Run the script; Ctrl-C and SIGTERM end it and what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(script())
    except KeyboardInterrupt:
        sys.exit(f"\n{script_name()}: interrupted")


def parser(doc: str | None, name: str, seed_is_for: str) -> argparse.ArgumentParser:
    """name: of the script, of its make target and of its folder in runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help=f"for {seed_is_for}")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / name, help="folder of the seeds' folders")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to test that every part runs; nothing is learned"
    )
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: randomly permuted rewards")
    parser.set_defaults(name=name)
    return parser


def choose_device(name: str, gpus: str) -> None:
    """The CPU, unless MESHRL_DEVICE is set. gpus: those that the ranks need, in words."""
    if not os.environ.get("MESHRL_DEVICE"):
        os.environ["MESHRL_DEVICE"] = "cpu"
        it, command = "them" if gpus.endswith("s") else "it", "make" if IS_CHECKOUT else "meshrl"
        print(f"This uses the CPU. On a machine with {gpus}, MESHRL_DEVICE=cuda {command} {name} uses {it}.")


def make_folder(args: argparse.Namespace, parts: Sequence[str]) -> Path:
    """Make and return the folder of a seed, relative to the checkout if it is in it, and change to the checkout (of an
    installed wheel, the working folder takes its place). Of `parts`, what an earlier call made is removed. A folder
    that this script did not make is an error."""
    out = args.out.resolve() / f"{'control' if args.shuffle_rewards else 'seed'}_{args.seed}"
    marker = out / f".{args.name}"
    if out.exists() and not marker.is_file() and any(out.iterdir()):
        sys.exit(f"{args.name}: {out} exists and was not made by {args.name}.py; move it, or give another --out")
    for path in (out / name for name in (*parts, "report.json")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    text = f"Made by {args.name}.py; its next call with this seed replaces {', '.join(parts)} and report.json."
    marker.write_text(f"{text}\n")
    os.chdir(ROOT)
    return relative(out)


def relative(path: Path) -> Path:
    """The path as a user of the checkout writes it."""
    return Path(os.path.relpath(path, ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else path


def print_heading(number: str, text: str) -> None:
    print(f"\n[{number}] {text}\n", flush=True)


def run(arguments: list[Any]) -> None:
    """Run one Python command to its end; its output goes to ours. None of its processes outlives this process."""
    words = [str(relative(a) if isinstance(a, Path) else a) for a in arguments]
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
        sys.exit(f"{script_name()}: the command above ended with exit code {code}; its last lines state the reason")
    used = os.times()
    cpu_s = used.children_user + used.children_system - cpu.children_user - cpu.children_system
    print(f"  (took {time.monotonic() - began:.0f} s, {cpu_s:.0f} s of CPU)", flush=True)


def train(args: argparse.Namespace, config: Path, settings: Sequence[Any], smoke: Sequence[str]) -> dict[str, Any]:
    """`meshrl train`, or the control; returns result.json of the run, which is named grpo."""
    place = next(text.split("=", 1)[1] for text in settings if str(text).startswith("run.folder="))
    control = EXAMPLES / "quickstart" / "shuffled_rewards.py"
    how = [control] if args.shuffle_rewards else ["-m", "meshrl", "train"]
    run([*how, config, "run.name=grpo", *settings, *(smoke if args.smoke else ())])
    result: dict[str, Any] = json.loads((Path(place) / "grpo" / "result.json").read_text())
    return result


@dataclass
class PeakMemory:
    """The largest sums so far over this process and its descendants: of proportional and of resident set sizes."""

    proportional: int = 0
    resident: int = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the memory of this process and its descendants within the block, every two seconds."""
    peak, done = PeakMemory(), threading.Event()

    def sample() -> None:
        own = psutil.Process()
        while not done.wait(2.0):
            sizes = [memory_of(p) for p in (own, *own.children(recursive=True))]
            peak.proportional = max(peak.proportional, sum(size[0] for size in sizes))
            peak.resident = max(peak.resident, sum(size[1] for size in sizes))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def memory_of(process: psutil.Process) -> tuple[int, int]:
    """Proportional and resident set size; 0 for a process that has just ended."""
    try:
        info = process.memory_full_info()
    except psutil.Error:
        return 0, 0
    return getattr(info, "pss", info.rss), info.rss


def show_rows(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        print(f"  {name + '.jsonl':<14} {len(lines):>6} rows, such as {lines[0]}")


Pair = tuple[Trajectory, Trajectory]


def before_and_after(grpo: Path, result: dict[str, Any]) -> list[Pair]:
    """Three held-out answers before and after the training; those that were wrong and became right come first."""
    before, after = (list(read_rollouts(grpo / "rollouts" / f"eval_{n:06d}.jsonl")) for n in (0, result["steps"]))
    pairs = [(old.trajectory, new.trajectory) for old, new in zip(before, after, strict=True)]
    pairs.sort(key=lambda pair: score(pair[0]) - score(pair[1]))
    return pairs[:3]


def print_greedy_answers(folder: str, pairs: list[Pair], max_new_tokens: int) -> None:
    """Print greedy answers by plain Transformers: the saved model does not need meshrl."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    print(f"  {type(model).__name__}, {model.num_parameters():,} parameters; answers by model.generate:")
    for _, new in pairs:
        inputs = tokenizer.apply_chat_template(
            new.prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        print(
            f"  {question(new)} = {tokenizer.decode(out[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True)}"
        )


def score(trajectory: Trajectory) -> float:
    """Of the first term of the reward that applies to the answer; 0 if its grading failed."""
    first = next((result for result in trajectory.rewards.values() if result is not None), 0.0)
    return first if isinstance(first, float) else 0.0


def question(trajectory: Trajectory) -> str:
    content: Any = (trajectory.prompt.messages or [])[-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "[image]") for part in content)


def answer(trajectory: Trajectory) -> str:
    return str(trajectory.turns[-1].messages[-1]["content"])


def print_pairs(pairs: list[Pair]) -> None:
    short = max(len(question(new)) for _, new in pairs) <= 10  # then a row of a table
    if short:
        print(f"\n  {'problem':<10} {'solution':>8}   {'before the RL':<16} after the RL")
    for old, new in pairs:
        before, after = (f"{answer(t)} ({'right' if score(t) else 'wrong'})" for t in (old, new))
        if short:
            print(f"  {question(new):<10} {new.prompt.answer:>8}   {before:<16} {after}")
        else:
            print(f"\n  {question(new)} Solution: {new.prompt.answer}")
            print(f"    before the RL: {before!r:.300}\n    after the RL:  {after!r:.300}")


def write_result(
    args: argparse.Namespace,
    place: Path,
    result: dict[str, Any],
    pairs: list[Pair],
    began: float,
    peak: PeakMemory,
    of_sets: dict[str, tuple[float, float]] | None = None,
) -> float:
    """Print what was learned, and write report.json. began: time.monotonic() of the script's start. of_sets: the
    accuracies of each held-out set, before and after; the first is that of the run.
    Returns the held-out accuracy after the training."""
    evals = result["evals"][0]["mean_at_k"], result["evals"][-1]["mean_at_k"]
    before, after = next(iter(of_sets.values())) if of_sets else evals
    report = {
        "seed": args.seed,
        "eval_before": before,
        "eval_after": after,
        **({"eval_sets": of_sets} if of_sets else {}),
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(sum(os.times()[:4]), 1),
        "peak_bytes": peak.proportional,
        "peak_rss_bytes": peak.resident,
        "steps": result["steps"],
        "reward_curve": result["reward_curve"],
        "model": result["model"],
    }
    grpo = place / "grpo"
    print("  mean reward by step")
    print("  " + text_curve(report["reward_curve"]).replace("\n", "\n  "))
    print_pairs(pairs)
    print()
    for name, (first, last) in (of_sets or {"held-out accuracy": (before, after)}).items():
        print(f"{name:<22} {first:.3f} before, {last:.3f} after")
    print(f"took                   {report['wall_s']:.0f} s, {report['cpu_s']:.0f} s of CPU")
    print(f"peak memory            {report['peak_bytes'] / 1e9:.1f} GB in all processes together")
    print(f"model                  {report['model']}")
    (place / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"curves and answers     {grpo / 'report.html'}")
    print(f"these numbers          {place / 'report.json'}")
    command = "meshrl" if shutil.which("meshrl") else Path(sys.executable).with_name("meshrl")
    print(f"talk to the model      {command} chat {grpo}")
    print(f"train it on your rows  {command} init further --model {grpo} --data FILE --prompt COLUMN --answer COLUMN")
    return float(report["eval_after"])


def exit_code(args: argparse.Namespace, accuracy: float, least: float, most_of_control: float, grpo: Path) -> int:
    """1 if the model did not learn, or if the control learned. least, most_of_control: bounds of the held-out accuracy.
    grpo: the folder of the RL run."""
    if args.smoke:
        return 0
    if args.shuffle_rewards and accuracy > most_of_control:
        text = f"{args.name}: with random rewards the accuracy must be at most {most_of_control:.3f}"
        print(f"{text}, but it is {accuracy:.3f}", file=sys.stderr)
        return 1
    if not args.shuffle_rewards and accuracy < least:
        text = f"{args.name}: {accuracy:.3f} of the held-out answers are right after training; {least} is required"
        print(f"{text}. The reward curve and {grpo}/metrics.jsonl show where it stalled", file=sys.stderr)
        return 1
    return 0
