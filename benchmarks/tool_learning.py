"""Does a tiny model learn to use a tool, for every seed, and with an agent of one's own?

    python benchmarks/tool_learning.py --at-once 2        # seeds 1000 to 1009; the broken calculator for the first

Runs examples/multi_turn/multi_turn.py for each seed, as `make multi-turn SEED=N` does. From the same warm-ups it trains
the first `--controls` seeds with a calculator that returns random numbers, and the first `--endpoint` seeds by
examples/multi_turn/my_agent.py, a program with OpenAI's SDK (`pip install openai`). The recipe was chosen with seeds 1
to 5. All accuracies and shares of right calls are of held-out answers sampled at temperature 1.

num_seeds_learned     seeds whose accuracy and share of right calls rose from below 0.3 to at least 0.75; 9 of 10
broken_after_max      highest accuracy with the broken calculator
num_equal_digests     endpoint runs whose weights equal those of agent.kind multi_turn to the bit
wall_s_max, cpu_s_max seconds of the slowest run; no bar for wall_s if other processes load the machine
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import ROOT, Report, parser

FOLDER = ROOT / "examples" / "multi_turn"
START, LEARNED, BROKEN, WALL_S = 0.30, 0.75, 0.10, 360.0
IDLE_LOAD = 0.5  # a higher load average means that other processes use the machine
BROKEN_TOOL = ["agent.args.tools=[examples.multi_turn.task:broken_calculator]"]
ENDPOINT = [
    "agent.kind=endpoint",
    "agent.args={function: examples.multi_turn.my_agent:solve, max_turns: 3}",
    "data.tools=tools",
]
SMOKE = ["loop.num_steps=2", "loop.prompts_per_step=4", "data.eval_limit=16", "train.scheduler.warmup_steps=0"]


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--num-seeds", type=int, default=10, help="(default 10)")
    p.add_argument("--first-seed", type=int, default=1000, help="(default 1000)")
    p.add_argument("--controls", type=int, default=1, help="seeds that also run with the broken tool (default 1)")
    p.add_argument("--endpoint", type=int, default=0, help="seeds that also run through the endpoint (default 0)")
    p.add_argument("--at-once", type=int, default=1, help="runs at the same time (default 1)")
    args = p.parse_args()
    if args.smoke:
        args.num_seeds = args.controls = 1
    report = Report("tool_learning", args)
    report.print_line("| seed | run | accuracy before | after | right calls before | after | wall s | CPU s | load |")
    report.print_line("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:

        def runs_of(seed: int) -> list[dict[str, Any]]:
            kinds = {"multi_turn": True, "broken": seed - args.first_seed < args.controls}
            kinds["endpoint"] = seed - args.first_seed < args.endpoint
            return [run(report, Path(folder), seed, kind, args.smoke) for kind, wanted in kinds.items() if wanted]

        seeds = range(args.first_seed, args.first_seed + args.num_seeds)
        found = [each for of_seed in pool.map(runs_of, seeds) for each in of_seed]
    by_kind = {kind: {r["seed"]: r for r in found if r["run"] == kind} for kind in ("multi_turn", "broken", "endpoint")}
    plain, broken, served = by_kind["multi_turn"], by_kind["broken"], by_kind["endpoint"]
    learned = sum(
        all(before < START and after >= LEARNED for before, after in (r["accuracy"], r["right_calls"]))
        for r in plain.values()
    )
    walls = [r["wall_s"] for r in plain.values()]
    report.figure("num_seeds", len(plain))
    report.figure("accuracy_after_min", min(r["accuracy"][1] for r in plain.values()))
    report.figure("cpu_s_max", max(r["cpu_s"] for r in plain.values()))
    report.figure("wall_s_max", max(walls))
    report.bar("num_seeds_learned", report.figure("num_seeds_learned", learned), at_least=math.ceil(0.9 * len(plain)))
    if broken:
        highest = report.figure("broken_after_max", max(r["accuracy"][1] for r in broken.values()))
        report.bar("broken_after_max", highest, at_most=BROKEN)
    if served:
        equal = sum(r["weights"] == plain[seed]["weights"] for seed, r in served.items())
        report.bar("num_equal_digests", report.figure("num_equal_digests", equal), at_least=len(served))
    if report.load_before <= IDLE_LOAD and args.at_once == 1:
        report.bar("wall_s_max", max(walls), at_most=WALL_S)
    else:
        report.print_line("bar wall_s_max: not measured, the machine was not idle")
    report.raw = {"runs": found}
    report.finish()


def run(report: Report, folder: Path, seed: int, kind: str, smoke: bool) -> dict[str, Any]:
    """One run; returns its figures. The exit code of the example is ignored: a low accuracy is a result here."""
    place, load, began = folder / f"seed_{seed}", round(os.getloadavg()[0], 1), time.monotonic()
    if kind == "multi_turn":
        arguments = [FOLDER / "multi_turn.py", "--seed", seed, "--out", folder, *(["--smoke"] if smoke else [])]
    else:
        (warm,) = place.glob("sft/checkpoints/step_*/model")
        start, changed = place / "start", BROKEN_TOOL if kind == "broken" else ENDPOINT
        settings = [f"run.folder={place}", f"run.name={kind}", f"run.seed={seed}", f"model.path={warm}", *changed]
        settings += [f"data.path={start}/train.jsonl", f"data.eval_path={start}/heldout.jsonl"]
        arguments = ["-m", "meshrl", "train", FOLDER / "grpo.yaml", *settings, *(SMOKE if smoke else [])]
    command, environment = [sys.executable, *map(str, arguments)], {"MESHRL_DEVICE": "cpu"} | os.environ
    with open(folder / f"{seed}_{kind}.log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _, _, used = os.wait4(process.pid, 0)  # with the processes that it has started
    result = place / ("grpo" if kind == "multi_turn" else kind) / "result.json"
    facts = json.loads(result.read_text()) if result.is_file() else {"model": None}
    if facts["model"] is None:
        raise SystemExit(f"seed {seed}, {kind}:\n{Path(log.name).read_text()[-3000:]}")
    lines = [json.loads(line).get("metrics", {}) for line in (result.parent / "metrics.jsonl").open()]
    evals, steps = ([line for line in lines if name in line] for name in ("eval/mean_at_k", "rollout/turns_mean"))
    digest = hashlib.sha256()
    for path in sorted((ROOT / facts["model"]).glob("*.safetensors")):
        digest.update(path.read_bytes())
    found = {
        "seed": seed,
        "run": kind,
        "accuracy": [evals[0]["eval/mean_at_k"], evals[-1]["eval/mean_at_k"]],
        "right_calls": [evals[0]["eval/reward/term/called"], evals[-1]["eval/reward/term/called"]],
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "load_before": load,
        "weights": digest.hexdigest(),
        "turns": [round(line["rollout/turns_mean"], 3) for line in steps],
        "reward_curve": facts["reward_curve"],
    }
    shown = " | ".join(f"{value:.3f}" for value in (*found["accuracy"], *found["right_calls"]))
    report.print_line(f"| {seed} | {kind} | {shown} | {found['wall_s']:.0f} | {found['cpu_s']:.0f} | {load} |")
    return found


if __name__ == "__main__":
    main()
