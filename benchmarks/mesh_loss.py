"""The loss of the quickstart's warm-up under each mesh, in fp32: it must not depend on the mesh.

    python benchmarks/mesh_loss.py

Each run is `meshrl sft examples/quickstart/sft.yaml` from the same random weights, with the same rows, for 20 steps.
loss_NAME: the loss of the last step. off_NAME: the largest distance of any step's loss to that of one rank, relative to
it; the bar is 1e-5.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, Report, parser

QUICKSTART = ROOT / "examples" / "quickstart"
MESHES: dict[str, dict[str, int]] = {
    "one_rank": {},
    "dp_2": {"dp_shard": 2},
    "tp_2": {"tp": 2},
    "ulysses_2": {"ulysses": 2},
    "tp_4": {"tp": 4},
    "ulysses_4": {"ulysses": 4},
    "ulysses_2_tp_2": {"ulysses": 2, "tp": 2},
}


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    p.add_argument("--meshes", nargs="+", choices=list(MESHES)[1:], default=list(MESHES)[1:])
    args = p.parse_args()
    if args.smoke:
        args.steps, args.meshes = 2, ["tp_2"]
    report = Report("mesh_loss", args)
    with tempfile.TemporaryDirectory(prefix="mesh-loss-") as folder:
        start = [sys.executable, str(QUICKSTART / "task.py"), "--out", f"{folder}/start"]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL)
        curves = {}
        for name in ["one_rank", *args.meshes]:
            curves[name] = curve(Path(folder), name, args.steps)
            report.print_line(f"{name}: {curves[name][-1]:.8g}")
    report.raw["loss"] = dict(curves)
    alone = curves.pop("one_rank")
    report.figure("loss_one_rank", alone[-1], digits=8)
    for name, losses in curves.items():
        report.figure(f"loss_{name}", losses[-1], digits=8)
        off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        report.bar(f"off_{name}", report.figure(f"off_{name}", off), at_most=1e-5)
    report.finish()


def curve(folder: Path, name: str, steps: int) -> list[float]:
    """The loss of each step."""
    axes, ranks = MESHES[name], 1
    for size in axes.values():
        ranks *= size
    values: dict[str, Any] = {f"train.mesh.{axis}": size for axis, size in axes.items()} | {
        "model.path": folder / "start",
        "sft.path": folder / "start" / "warmup.jsonl",
        "sft.num_steps": steps,
        "train.scheduler.warmup_steps": 1,
        "cluster.num_train_ranks": ranks,
        "run.folder": folder,
        "run.name": name,
    }
    command = [sys.executable, "-m", "meshrl", "sft", str(QUICKSTART / "sft.yaml")]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in values.items())], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["loss/nll"] for line in lines if "metrics" in line]


if __name__ == "__main__":
    main()
