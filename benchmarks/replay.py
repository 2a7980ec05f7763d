"""Runs that were killed and continued, and their steps repeated by `meshrl replay`: equal digests, time, and what the
records cost.

    python benchmarks/replay.py             # about half an hour on two cores
    python benchmarks/replay.py --smoke

Each run has 40 steps, five of the quickstart's task and one with tools, is killed twice at random moments by SIGKILL,
and continues. Then ten of its steps, drawn at random, are repeated, each from the nearest state before it or from the
beginning of the run. The time of a replay is that of its steps, over the time that the run took for the same steps.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import ROOT, Report, median, parser

from meshrl.cluster import actors
from meshrl.config.load import load_run_config
from meshrl.loops import train_step
from meshrl.monitor.digests import DIGESTS_FILE, DigestLog, read_digests
from meshrl.monitor.sinks import read_metrics
from meshrl.run import start
from meshrl.tools.replay import replay
from meshrl.tools.report.page import write_report
from meshrl.train.engine import TrainEngine

QUICKSTART, MULTI_TURN = ROOT / "examples" / "quickstart", ROOT / "examples" / "multi_turn"
NUM_STEPS, NUM_KILLS, NUM_REPLAYED = 40, 2, 10
ASYNC = ("loop.kind=fully_async", "loop.max_staleness=2", "cluster.num_train_ranks=1", "cluster.num_rollout_ranks=1")
CORRECTED = ("train.updates_per_step=2", "algo.kl.coef=0.05", "algo.loss.kind=gspo", "loop.max_replaced_groups=8")
RUNS: dict[str, tuple[str, ...]] = {
    "GRPO": (),
    "two updates, KL, GSPO, replaced groups": CORRECTED,
    "LoRA in bf16": ("model.lora.enabled=true", "model.dtype=bfloat16"),
    "mixture with router replay": ("rollout.router_replay=true",),
    "fully_async, staleness 2": ASYNC,
    "tools, several turns": (),
}
TOOLS = "tools, several turns"  # the task of examples/multi_turn
OTHER_RANKS = "GRPO"  # continues with one rank in place of two after its first kill


def warm_start(folder: Path, smoke: bool) -> dict[str, Path]:
    """Models that solve some problems, with their rows: the quickstart's, a mixture of experts, and one with tools."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    for example in (QUICKSTART, MULTI_TURN):
        task = [sys.executable, str(example / "task.py"), "--seed", "0", "--out", str(folder / example.name)]
        subprocess.run(task, check=True, capture_output=True)
    start = folder / QUICKSTART.name
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=len(tokenizer), initializer_range=0.08, tie_word_embeddings=True, **sizes, **experts)
    )
    mixture.save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    models, steps = {}, 3 if smoke else 150
    for name, model, example in (
        ("dense", start, QUICKSTART),
        ("mixture", folder / "mixture", QUICKSTART),
        ("tools", folder / MULTI_TURN.name, MULTI_TURN),
    ):
        run_to_end(
            [
                *("sft", str(example / "sft.yaml"), f"run.folder={folder}", f"run.name=sft_{name}"),
                *(f"model.path={model}", f"sft.path={folder / example.name / 'warmup.jsonl'}"),
                f"sft.num_steps={steps}",
                *("cluster.num_train_ranks=1", "train.scheduler.warmup_steps=0"),
            ]
        )
        models[name] = folder / f"sft_{name}" / "checkpoints" / f"step_{steps:06d}" / "model"
    return models


def run_to_end(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "meshrl", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"meshrl {' '.join(arguments)}\n{done.stderr[-3000:]}")


def folder_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


def example_of(name: str) -> Path:
    return MULTI_TURN if name == TOOLS else QUICKSTART


def settings(folder: Path, name: str, model: Path, num_steps: int) -> list[str]:
    return [
        *(
            f"run.folder={folder}",
            f"run.name={folder_name(name)}",
            "run.resume=auto",
            f"loop.save_every_steps={num_steps // 8 or 1}",
        ),
        *(f"model.path={model}", f"data.path={folder / example_of(name).name / 'train.jsonl'}", "data.eval_path=null"),
        *(f"loop.num_steps={num_steps}", "loop.prompts_per_step=16", "train.scheduler.warmup_steps=0", *RUNS[name]),
    ]


def recorded(folder: Path, name: str, model: Path, num_steps: int, draw: random.Random, smoke: bool) -> Path:
    """A run that is killed and continues."""
    keys, run = settings(folder, name, model, num_steps), folder / folder_name(name)
    command = [sys.executable, "-m", "meshrl", "train", str(example_of(name) / "grpo.yaml")]
    for kill in range(1 if smoke else NUM_KILLS):
        process = subprocess.Popen([*command, *keys], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = 2 if smoke else draw.randint(8 + 13 * kill, 12 + 13 * kill)  # steps
        while process.poll() is None and not (run / "rollouts" / f"step_{until:06d}.jsonl").exists():
            time.sleep(0.02)
        time.sleep(draw.random() * 0.2)
        process.kill()
        process.wait()
        if name == OTHER_RANKS:
            keys.append("cluster.num_train_ranks=1")
    run_to_end([*command[3:], *keys])
    return run


def repeated(run: Path, step: int, seconds: dict[int, float]) -> tuple[str | None, float | None]:
    """The first difference of a replay, and its time over that of the run for the same steps, without the first one,
    which follows a start. seconds: of each step of the run."""
    at = dict[int, float]()

    def note(text: str) -> None:
        if text.startswith("step ") and text.endswith(": equal"):
            at[int(text.split()[1].rstrip(":"))] = time.perf_counter()

    difference = replay(run, step, note)
    pairs = [(before, now) for before, now in pairwise(sorted(at)) if now in seconds]
    took, of_run = sum(at[now] - at[before] for before, now in pairs), sum(seconds[now] for _, now in pairs)
    return None if difference is None else difference.text, took / of_run if pairs else None


def seconds_of_steps(run: Path) -> dict[int, float]:
    """The time of each step, without those after a start."""
    lines, _ = read_metrics(run / "metrics.jsonl")
    firsts = {*read_digests(run)[0]}
    return {
        now.step: now.time - before.time
        for before, now in pairwise(lines)
        if now.step == before.step + 1 and now.step not in firsts
    }


def cost(folder: Path, model: Path, num_steps: int, number: int) -> tuple[float, float]:
    """The share of the CPU time of a run's steps that the digests take, in this process, and of the rollouts' bytes."""
    spent, ends = [0.0], list[float]()

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                if ends:  # after the first step
                    spent[0] += time.thread_time() - began
                if function is write:
                    ends.append(time.process_time())

        return measured

    write = DigestLog.write
    places = [(TrainEngine, "_digests"), (actors, "array_digest"), (train_step, "update_record"), (DigestLog, "write")]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in before:
        setattr(place, name, timing(function))
    try:
        keys = settings(folder, "GRPO", model, num_steps)
        keys += [f"run.name=cost_{number}", "cluster.executor=inline", "cluster.num_train_ranks=1"]
        run = start.train(load_run_config(QUICKSTART / "grpo.yaml", keys), write_report)
    finally:
        for place, name, function in before:
            setattr(place, name, function)
    rollouts = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    of_steps = sum(len(line) for line in (run / DIGESTS_FILE).read_text().splitlines() if '"config"' not in line)
    return spent[0] / (ends[-1] - ends[0]), of_steps / rollouts


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS), help="without a name: only the cost")
    args = p.parse_args()
    report, draw = Report("replay", args), random.Random(0)
    num_steps = 4 if args.smoke else NUM_STEPS
    different, ratios = 0, list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = warm_start(folder, args.smoke)
        costs = [cost(folder, models["dense"], num_steps, i) for i in range(1 if args.smoke else 5)]
        share, of_bytes = (median(values) for values in zip(*costs, strict=True))
        report.raw["cost"] = costs
        for name in args.only[:1] if args.smoke else args.only:
            model = models[first if (first := name.partition(" ")[0].strip(",")) in models else "dense"]
            run = recorded(folder, name, model, num_steps, draw, args.smoke)
            seconds = seconds_of_steps(run)
            steps = sorted(draw.sample(range(1, num_steps + 1), 2 if args.smoke else NUM_REPLAYED))
            found = {step: repeated(run, step, seconds) for step in steps}
            starts = sorted(read_digests(run)[0])
            report.raw[name] = {"starts": starts, "replays": json.loads(json.dumps(found)), "seconds": seconds}
            wrong = sum(text is not None for text, _ in found.values())
            different += wrong
            of_run = [ratio for _, ratio in found.values() if ratio is not None]
            ratios += of_run
            report.print_line(f"{name}: {len(found) - wrong} of {len(found)} equal to the bit, starts at {starts}")
            if of_run:
                report.figure(f"time of a replay, {name}", median(of_run))
    if args.only:
        report.bar("replays that differ", different, at_most=0)
    if ratios:
        report.bar("time of a replay over the run's", median(ratios), at_most=0.5)
    report.bar("digests, share of a step's CPU time", share, at_most=0.01)
    report.bar("digests, share of the rollouts' bytes", of_bytes, at_most=0.02)
    report.finish()


if __name__ == "__main__":
    main()
