"""The part of engine_overhead.py about the axes of the mesh, in two ranks with gloo, of one thread each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bare_fsdp2 import BareLoop
from bare_tp import BareTP
from bare_ulysses import ChunkedModel
from measure import Report, Timing, alternate, median, paired_ratio
from mesh_bytes import KINDS, CountedBytes
from torch.distributed.tensor import DTensor
from workload import micro_batches, model_folder

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.device import keep_freed_memory
from meshrl.core.types import POLICY
from meshrl.model.recipe import load_causal_lm
from meshrl.parallel.mesh import build_mesh
from meshrl.plan.traffic import Shape, Work, step_bytes
from meshrl.train.engine import TrainEngine

WORLD = 2
LR = 1e-5
MESHES = {"dp_shard": (1, WORLD, 1, 1), "ulysses": (1, 1, WORLD, 1), "tp": (1, 1, 1, WORLD)}
BARE: dict[str, Callable[[Path], Any]] = {
    "dp_shard": lambda folder: BareLoop(folder, torch.float32, LR, None),
    "ulysses": lambda folder: BareLoop(folder, torch.float32, LR, None, ChunkedModel),
    "tp": lambda folder: BareTP(folder, LR, None, build_mesh(MESHES["tp"], "cpu")["dp_shard"]),
}


def axes(report: Report, args: Any) -> None:
    """The overhead over a bare loop and the communicated bytes, for each axis."""
    folder = model_folder(args.model, "smoke" if args.smoke else "5M")
    with tempfile.TemporaryDirectory(prefix="axes-") as name:
        torch.multiprocessing.spawn(_rank_main, (args, folder, Path(name)), nprocs=WORLD)
        measured = json.loads((Path(name) / "measured.json").read_text())
    for axis in MESHES:
        timings = {name: [Timing(*t) for t in took] for name, took in measured["timings"][axis].items()}
        report.add_timings(f"step_{axis}", timings)
        cpu, wall = ({w: [getattr(t, c) for t in ts] for w, ts in timings.items()} for c in ("cpu_s", "wall_s"))
        report.figure(f"cpu_s_engine_{axis}", median(cpu["engine"]))
        report.figure(f"wall_s_engine_{axis}", median(wall["engine"]))
        ratio = paired_ratio(cpu["engine"], cpu["bare"])
        value = report.figure(f"overhead_{axis}", type(ratio)(ratio.value - 1, ratio.low - 1, ratio.high - 1))
        ratio = paired_ratio(wall["engine"], wall["bare"])
        report.figure(f"overhead_{axis}_wall", type(ratio)(ratio.value - 1, ratio.low - 1, ratio.high - 1))
        report.bar(f"overhead_{axis}", value, at_most=0.05)
        if axis == "tp":
            ratio = paired_ratio(cpu["engine"], cpu["plain"])
            report.figure("overhead_tp_plain", type(ratio)(ratio.value - 1, ratio.low - 1, ratio.high - 1))
    report.raw["bytes"] = measured["bytes"]
    for name, found in measured["bytes"].items():
        for kind in KINDS:
            counted, formula = found["counted"].get(kind, 0), found["formula"].get(kind, 0)
            report.print_line(f"bytes of {name}, {kind}: {counted:,}, by the formula {formula:,}")
        report.figure(f"bytes_{name}", sum(found["counted"].values()))
        report.bar(f"bytes_off_{name}", _distance(found), at_most=0)


def _distance(found: dict[str, Any]) -> float:
    return float(sum(abs(found["counted"].get(kind, 0) - found["formula"].get(kind, 0)) for kind in KINDS))


def _rank_main(rank: int, args: Any, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), WORLD), rank=rank, world_size=WORLD)
    measured: dict[str, Any] = {"timings": {}, "bytes": {}}
    for axis in MESHES:
        measured["timings"][axis] = _timings(axis, args, folder)
        for recompute in (False, True):
            measured["bytes"][axis + "_recomputed" * recompute] = _bytes(axis, args, folder, recompute)
    if rank == 0:
        (out / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _engine(axis: str, folder: Path, recompute: bool) -> TrainEngine:
    cfg = TrainConfig(activation_checkpointing=recompute)
    mesh = build_mesh(MESHES[axis], "cpu")
    return TrainEngine.wrap(load_causal_lm(folder), cfg, mesh, POLICY, torch.float32)


def _batches(engine: TrainEngine, i: int, smoke: bool) -> list[Any]:
    at = engine.coordinates
    samples, rows = micro_batches(i, smoke, at.num_data)
    return [engine.pack([samples[r] for r in micro], micro) for micro in rows[at.data_index]]


def _timings(axis: str, args: Any, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Of each contender's steps; the CPU time is that of both ranks."""
    ours, bare = _engine(axis, folder, False), BARE[axis](folder)
    loss = make_policy_loss(AlgoConfig())
    work = {i: _batches(ours, i, args.smoke) for i in range(-2, args.rounds)}

    def step(i: int) -> float:
        ours.forward_backward(work[i], loss)
        return ours.optim_step(LR).grad_norm

    norms = step(-2), bare.step(work[-2])
    if not np.isclose(*norms, rtol=1e-3):
        raise SystemExit(f"gradient norms of {axis} differ: {norms}; the two don't compute the same")
    contenders = {"engine": step, "bare": lambda i: bare.step(work[i])}
    if axis == "tp":
        plain = BareTP(folder, LR, None)
        contenders["plain"] = lambda i: plain.step(work[i])
    took = alternate(contenders, args.rounds, before_each=dist.barrier)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, {name: [asdict(t) for t in timings] for name, timings in took.items()})
    return {
        name: [
            (max(t["wall_s"] for t in ranks), sum(t["cpu_s"] for t in ranks))
            for ranks in zip(*(timings[name] for timings in every), strict=True)
        ]
        for name in took
    }


def _bytes(axis: str, args: Any, folder: Path, recompute: bool) -> dict[str, Any]:
    """Counted and by the formula, of this rank's step."""
    engine = _engine(axis, folder, recompute)
    batches = _batches(engine, 0, args.smoke)
    with CountedBytes() as counter:
        engine.forward_backward(batches, make_policy_loss(AlgoConfig()))
        engine.optim_step(LR)
    work = [Work(tokens=batch.num_tokens, scored=len(batch.scored)) for batch in batches]
    shape = shape_of(engine)
    formula = step_bytes(shape, work, MESHES[axis], width=4, recomputed=shape.num_layers * recompute)
    return {"counted": counter.bytes, "formula": formula, "calls": counter.calls}


def shape_of(engine: TrainEngine) -> Shape:
    text = engine.model.lm.config.get_text_config()
    sizes = {name: _before_fsdp(p) for name, p in engine.model.lm.named_parameters()}
    return Shape(
        num_layers=len(engine.model.layers),
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        key_heads=text.num_key_value_heads,
        head_dim=text.hidden_size // text.num_attention_heads,
        blocks=[size for name, size in sizes.items() if ".layers." in name],
        root=[size for name, size in sizes.items() if ".layers." not in name],
        replicated=[size for name, size in sizes.items() if "norm" in name],
    )


def _before_fsdp(p: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter's part in a rank of tp."""
    assert isinstance(p, DTensor)
    size, names = list(p.shape), p.device_mesh.mesh_dim_names or ()
    if "tp" in names:
        tp = names.index("tp")
        if p.placements[tp].is_shard():
            size[p.placements[tp].dim] //= p.device_mesh.size(tp)  # type: ignore[attr-defined]
    return tuple(size)
