"""The memory that `meshrl plan` computes, over the peaks that were measured: of runs on CPU ranks made here, and of the
H200 cells of benchmarks/gpu_train.py in benchmarks/results.

    python benchmarks/plan_accuracy.py             # thirteen runs, about half an hour on two cores
    python benchmarks/plan_accuracy.py --smoke

A CPU rank's peak in a phase is the kernel's VmHWM, which begins again with each phase. A case's figure is the largest
phase that is planned, over the largest that is measured after the first step. The ranks return freed memory to the
system; by default they keep up to 512 MiB of it for their next tensors, which is no part of the plan.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from gpu_train import predicted_bytes
from measure import RESULTS, ROOT, Report, parser

from meshrl.config.train import TrainConfig
from meshrl.core.files import read_json
from meshrl.model.costs import run_memory
from meshrl.monitor.sinks import read_metrics
from meshrl.run.inputs import load_run

DATA = ROOT / "examples" / "data" / "gsm8k" / "train.jsonl"
MEASURED = {"optimizer": "optim", "save": "checkpoint"}  # a phase of the plan -> of the metrics
PROMPT = 193  # tokens of each prompt
WIDE: dict[str, Any] = dict(hidden_size=1024, num_hidden_layers=8, intermediate_size=4096, num_attention_heads=16)
DEEP: dict[str, Any] = dict(hidden_size=512, num_hidden_layers=24, intermediate_size=1024, num_attention_heads=8)
WORDS: dict[str, Any] = dict(hidden_size=512, num_hidden_layers=2, intermediate_size=1024)
WORDS_OF_LOGITS = 131072
LONG = ("rollout.sampling.max_new_tokens=500", "train.max_tokens_per_microbatch=2772")  # four rows
STORED = "train.activation_checkpointing=false"
CASES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {  # what dominates -> shape, ranks, overrides
    "parameters": (WIDE, 1, ()),
    "parameters, two ranks": (WIDE, 2, ()),
    "gathered groups": (WIDE, 2, ("train.sharding_strategy=SHARD_GRAD_OP",)),
    "replicas": (WIDE, 2, ("train.sharding_strategy=NO_SHARD",)),
    "four ranks": (WIDE, 4, ()),
    "activations": (DEEP, 1, (STORED, *LONG)),
    "activations, two ranks": (DEEP, 2, (STORED, *LONG)),
    "tensor parallelism": (DEEP, 2, (STORED, "train.mesh.tp=2", *LONG)),
    "logits": (WORDS, 1, LONG),
    "pages of the sampler": (DEEP, 1, (*LONG, "loop.samples_per_prompt=16")),
    "adapters": (WIDE, 1, ("model.lora.enabled=true",)),
    "8 bits": (WIDE, 1, ("train.optimizer.kind=adamw_8bit", "train.master_dtype=bfloat16")),
    "delta sync": (WIDE, 1, ("rollout.sync_mode=delta",)),
}


RETURNS_MEMORY = """
import meshrl.core.device

meshrl.core.device.keep_freed_memory = lambda device: False
"""


def measured(folder: Path, model: Path, ranks: int, keys: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """(planned, measured) bytes by phase, of a run of two steps."""
    content, rows = folder / "run.yaml", folder / "rows.jsonl"
    content.write_text("{}\n")
    rows.write_text("".join(json.dumps({"question": f"{i:02} " * 60, "answer": "1"}) + "\n" for i in range(99)))
    sizes = [
        "loop.num_steps=2",
        "loop.prompts_per_step=4",
        "loop.samples_per_prompt=4",
        f"data.max_prompt_tokens={PROMPT}",
    ]
    sizes += [
        "rollout.sampling.max_new_tokens=100",
        "train.max_tokens_per_microbatch=2344",
        "train.share_prompts=false",
        "algo.kl.coef=0.01",
    ]
    sizes += [f"cluster.num_train_ranks={ranks}", f"model.path={model}", "model.dtype=float32", f"data.path={rows}"]
    sizes += ["reward.terms.answer.kind=math_answer", "run.name=run", f"run.folder={folder}", "run.seed=1"]
    command = [sys.executable, "-m", "meshrl", "train", str(content), *sizes, *keys]
    (folder / "sitecustomize.py").write_text(RETURNS_MEMORY)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # larger blocks go back at once
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    _, of_ranks = run_memory(load_run(str(content), [*sizes, *keys], starts=False).config, "cpu")
    planned = {phase: of_ranks[0].total(phase) for phase in of_ranks[0].device["libraries"]}
    lines, _ = read_metrics(folder / "run" / "metrics.jsonl")
    of_steps = [line.metrics for line in lines if line.step > 1]  # moments exist
    names = {phase: f"memory/phase_bytes/{MEASURED.get(phase, phase)}" for phase in planned}
    found = {phase: max((int(line.get(name, 0)) for line in of_steps), default=0) for phase, name in names.items()}
    return planned, found


def gpu_cells() -> dict[str, tuple[float, float]]:
    """Cell -> (planned, measured) bytes of training on one H200, without the libraries. The newest file counts.
    Compiled blocks are not planned, and left out."""
    newest, cells = dict[str, float](), dict[str, tuple[float, float]]()
    for path in sorted(RESULTS.glob("gpu_train_2*.json")):
        figures = read_json(path)["figures"]
        newest |= {
            name: value for name, value in figures.items() if re.fullmatch(r"train_peak_gib_\S+_row_\d+(_ckpt)?", name)
        }
    for name, gib in newest.items():
        shape, tokens, checkpoints = re.fullmatch(r"train_peak_gib_(\S+)_row_(\d+)(_ckpt)?", name).groups()  # type: ignore[union-attr]
        cfg = TrainConfig(activation_checkpointing=bool(checkpoints))
        need = predicted_bytes(shape, cfg, int(tokens))
        cells[name.removeprefix("train_peak_gib_")] = need, gib * 2**30
    return cells


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = p.parse_args()
    report, ratios = Report("plan_accuracy", args), list[float]()
    sys.path.insert(0, str(ROOT / "examples"))
    from gsm8k_from_nothing import build
    from transformers import AutoModelForCausalLM

    for name in args.only[:1] if args.smoke else args.only:
        shape, ranks, keys = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            build(DATA.parent, model, **(dict(hidden_size=32, num_hidden_layers=1) if args.smoke else shape))
            if name == "logits":
                lm = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
                lm.resize_token_embeddings(WORDS_OF_LOGITS)
                lm.save_pretrained(model)
            planned, found = measured(Path(folder), model, ranks, keys)
        report.raw[name] = {"planned": planned, "measured": found}
        largest = max(size for phase, size in planned.items() if found[phase]) / max(found.values())
        ratios.append(report.figure(f"planned over measured, {name}", largest))
    cells = {} if args.smoke else gpu_cells()
    of_gpu = [report.figure(f"planned over H200, {name}", need / peak) for name, (need, peak) in cells.items()]
    off = [max(ratio, 1 / ratio) for ratio in ratios]
    report.bar("a CPU case's ratio, or its inverse", max(off), at_most=1.07)
    report.bar("the median of these", median(off), at_most=1.04)
    if of_gpu:
        report.bar("an H200 cell's ratio, or its inverse", max(max(ratio, 1 / ratio) for ratio in of_gpu), at_most=1.07)
    report.finish()


if __name__ == "__main__":
    main()
