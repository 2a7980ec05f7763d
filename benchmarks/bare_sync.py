"""What weight_sync.py runs inside the ranks: the bare transfer of the same bytes, training steps, memory, proofs off.

A bare transfer is what has to happen without any proof, by the shortest way that we know in the same topology: each
train rank casts the shard that it holds into the sampler's dtype, and the bytes are copied to where a sampler computes
with them. No digest, no header, no comparison of names, nothing read back.

- one rank that trains and samples: one pass, a cast from the master into the sampler's own tensor;
- two ranks that train and sample: each casts its shard into shared memory, and both copy both parts into place, with a
  barrier a bucket and two buckets, so that a rank casts one while the other still reads the last;
- samplers in processes of their own: each train rank casts its shard into its shared memory, a bucket at a time, and
  each sampler copies it into place, while the trainer casts the next. Buckets are announced by the same messages
  between the same processes as ours.

Every function here takes the RankWorker as its first argument; a ProcessExecutor calls it by its name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshrl.sync.expected import Expected
from meshrl.sync.manifest import DTYPE_BYTES, Layout, Piece
from meshrl.sync.transport import SharedRing, SharedRingView

_held: dict[str, Any] = {}  # of this process: rings, views, open fills
_compare = Expected.compare


def _targets(worker: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in worker.sampler._weights.lm.named_parameters()}


def _shards(worker: Any) -> dict[str, torch.Tensor]:
    return {name: t.view(-1) for name, t in worker.policy.shards().items()}


def _fills(worker: Any, layout: Layout) -> Iterator[int]:
    """Cast this rank's stream into its ring, bucket by bucket."""
    shard, slots = worker.policy.mesh["dp_shard"].get_local_rank(), _held["ring"].slots
    stream, shards = layout.streams[shard], _shards(worker)
    for index in range(stream.num_buckets):
        for piece in stream.pieces(index):
            size = DTYPE_BYTES[piece.entry.dtype]
            first, count = (piece.start - piece.entry.first) // size, (piece.stop - piece.start) // size
            out = slots[index % 2][piece.at : piece.at + count * size].view(getattr(torch, piece.entry.dtype))
            out.copy_(shards[piece.entry.name][first : first + count])
        yield index


def _place(piece: Piece, payload: torch.Tensor, targets: dict[str, torch.Tensor]) -> None:
    raw = targets[piece.entry.name].view(-1).view(torch.uint8)[piece.start : piece.stop]
    raw.copy_(payload[piece.at : piece.at + raw.numel()])


def open_ring(worker: Any, layout: Layout) -> str:
    _held["ring"] = SharedRing(2, layout.staging_bytes)
    return _held["ring"].name


def open_views(worker: Any, names: list[str], layout: Layout) -> None:
    _held["views"] = [SharedRingView(name, 2, layout.staging_bytes) for name in names]


def close_all(worker: Any) -> None:
    for view in _held.pop("views", []):
        view.close()
    if "ring" in _held:
        _held.pop("ring").close()


def beside_alone(worker: Any) -> float:
    """One rank that trains and samples; returns seconds."""
    shards, targets = worker.policy.shards(), _targets(worker)
    began = time.perf_counter()
    for name, target in targets.items():
        target.copy_(shards[name])
    return time.perf_counter() - began


def beside_each_other(worker: Any, layout: Layout) -> float:
    """Ranks that train and sample; returns seconds."""
    targets, began = _targets(worker), time.perf_counter()
    fills = _fills(worker, layout)
    for index in range(max(stream.num_buckets for stream in layout.streams)):
        next(fills, None)
        dist.barrier()
        for stream, view in zip(layout.streams, _held["views"], strict=True):
            for piece in stream.pieces(index) if index < stream.num_buckets else ():
                _place(piece, view.slot(index % 2), targets)
    return time.perf_counter() - began


def gathered(worker: Any) -> float:
    """The common way, for comparison: cast, all-gather each tensor, copy it into place; returns seconds."""
    targets, began = _targets(worker), time.perf_counter()
    for name, whole in worker.policy.wire_weights():
        targets[name].copy_(whole)
    return time.perf_counter() - began


def fill(worker: Any, layout: Layout) -> int | None:
    """The next bucket of this rank's shard; None after the last."""
    if "fills" not in _held:
        _held["fills"] = _fills(worker, layout)
    index = next(_held["fills"], None)
    if index is None:
        del _held["fills"]
    return index


def place(worker: Any, layout: Layout, stream: int, index: int) -> None:
    """Copy a bucket into the sampler's tensors."""
    targets = _targets(worker)
    for piece in layout.streams[stream].pieces(index):
        _place(piece, _held["views"][stream].slot(index % 2), targets)


def prove(worker: Any, resident: bool) -> None:
    """Read back what was loaded at each commit, or don't."""
    Expected.compare = _compare if resident else (lambda *args: None)  # type: ignore[method-assign]


def remember(worker: Any, wanted: bool) -> None:
    """Whether the next syncs send changes."""
    worker._out()._keep_base = wanted


def forget(worker: Any) -> None:
    """Free the buffers of the syncs so far."""
    worker._out().close()


@torch.no_grad()
def change(worker: Any, share: float, seed: int) -> None:
    """Change that share of this rank's weights, at random places, by more than the sampler's dtype rounds."""
    numbers = torch.Generator().manual_seed(seed + worker.spec.rank)
    for flat in _shards(worker).values():
        places = torch.randint(max(1, flat.numel()), (round(flat.numel() * share),), generator=numbers)
        flat[places] = flat[places] * 1.03 + 1e-4


@torch.no_grad()
def scan(worker: Any) -> float:
    """Find what has changed since the last sync, and nothing else: cast, compare, search; returns seconds."""
    base, shards, chunk = worker._out()._sender._base, _shards(worker), 1 << 18
    cast = torch.empty(chunk, dtype=next(iter(base.values())).dtype)
    began = time.perf_counter()
    for name, flat in shards.items():
        for low in range(0, flat.numel(), chunk):
            old = base[name][low : low + chunk]
            now = cast[: old.numel()].copy_(flat[low : low + chunk])
            np.flatnonzero(now.view(torch.int16).numpy() != old.view(torch.int16).numpy())
    return time.perf_counter() - began


def num_threads(worker: Any) -> int:
    return torch.get_num_threads()


def watch_memory(worker: Any) -> int:
    """Begin to look for the peak; returns the resident size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory(worker: Any) -> int:
    """The largest resident size since then."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
