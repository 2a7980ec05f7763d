"""The functions that weight_sync.py runs inside the ranks: syncs without proofs, changes of weights, memory.

A bare transfer does only the necessary work, without any proof: each train rank casts the boxes that it holds into the
sampler's dtype, and the bytes are copied into the sampler's tensors. There is no digest and no read-back. There are
three bare transfers, and the fastest one of each round counts:

- copy_1 and copy_2: one `copy_` for each box and each part, by torch with one and with two threads;
- cut: meshrl's own code that cuts and casts, with its threads, without digests.

One rank that trains and samples copies from the masters into the sampler's own tensors. With several processes, the
bare transfers use meshrl's transports, with the same messages between the same processes.

Every function here takes the RankWorker as its first argument, as an executor calls it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshrl.cluster import rank_sync
from meshrl.model.lora import named_weights
from meshrl.parallel.fsdp import full_tensor
from meshrl.sync.digest import RunningDigest
from meshrl.sync.layout import Part
from meshrl.sync.receiver import Incoming
from meshrl.sync.sender import WeightSender
from meshrl.sync.sockets import Sockets

BARE = {"copy_1": 1, "copy_2": 2, "cut": 0}  # -> threads of torch; 0 leaves their number unchanged
_OURS = (RunningDigest.update, Incoming._differing, WeightSender._cast_part, Incoming._write)
_threads: list[int] = []  # of torch in this process, before the first change


def _copied(self: WeightSender, part: Part, payload: torch.Tensor) -> RunningDigest:
    """Replaces `WeightSender._cast_part`."""
    out, source = payload.view(part.tensor.torch_dtype), self._elements[part.tensor.name, part.box_offsets]
    out.copy_(source[part.first : part.first + out.numel()])
    return RunningDigest(self.layout.digest)


def _placed(self: Incoming, section: torch.Tensor, views: list[torch.Tensor], part: Part) -> RunningDigest:
    """Replaces `Incoming._write`."""
    for view in views:
        view.copy_(section.view(view.dtype).view(part.shape))
    return RunningDigest(self.layout.digest)


def _nothing(*args: Any) -> list[str]:
    """Replaces a digest or a comparison."""
    return []


def choose(worker: Any, contender: str) -> None:
    """Set how the next syncs are done: as an entry of BARE, with the `wire` proof only, or with all proofs."""
    _threads.append(torch.get_num_threads())
    torch.set_num_threads(BARE.get(contender, 0) or _threads[0])
    update, differing, all_of, write = _OURS
    RunningDigest.update = _nothing if contender in BARE else update  # type: ignore[method-assign]
    Incoming._differing = _nothing if contender in BARE or contender == "wire" else differing  # type: ignore[method-assign]
    plain = contender in ("copy_1", "copy_2")
    WeightSender._cast_part = _copied if plain else all_of  # type: ignore[method-assign]
    Incoming._write = _placed if plain else write  # type: ignore[method-assign]


def copy_in_place(worker: Any, contender: str) -> float:
    """The bare transfer of one rank that trains and samples. Returns seconds."""
    choose(worker, contender)
    held, targets = worker.engines["policy"].weights().sources, worker.sampler._weights._tensors()
    began = time.perf_counter()
    for name, boxes in held.items():
        for box in boxes:
            targets[name].view(-1).copy_(box.elements[0 : box.elements.numel()])
    return time.perf_counter() - began


def act_as_machine(worker: Any) -> None:
    """From the next layout on, this rank counts as a separate machine."""

    def sockets(layout: Any, sender: int | None, host: str, machine: int, timeout_s: float) -> Sockets:
        return Sockets(layout, sender, host, worker.spec.rank, timeout_s)

    rank_sync.Sockets = sockets  # type: ignore[assignment, misc]


def sync_by_all_gather(worker: Any) -> float:
    """The usual method, for comparison: cast, all-gather each tensor, copy it into the sampler. Returns seconds."""
    trainer, targets = worker.engines["policy"], worker.sampler._weights._tensors()
    began = time.perf_counter()
    for name, p in named_weights(trainer.model.lm):
        targets[name].copy_(full_tensor(p.detach().to(trainer.compute_dtype)))
    return time.perf_counter() - began


def set_keep_base(worker: Any, keep_base: bool) -> None:
    """Set whether the next syncs store the sent weights as a base, and send only changes if there is a base."""
    sender = worker._sync()._sender
    sender._keep_base = keep_base
    if not keep_base:
        sender.base_version = None
        sender._base.clear()


@torch.no_grad()
def change_weights(worker: Any, share: float, seed: int) -> None:
    """Change this share of the rank's weights, at random places, by more than the rounding of the sampler's dtype."""
    numbers = torch.Generator().manual_seed(seed + worker.spec.rank)
    for boxes in worker.engines["policy"].weights().sources.values():
        for box in boxes:
            flat = box.elements[0 : box.elements.numel()]
            places = torch.randint(flat.numel(), (round(flat.numel() * share),), generator=numbers)
            flat[places] = flat[places] * 1.03 + 1e-4


@torch.no_grad()
def find_changes(worker: Any) -> float:
    """Only find the elements that have changed since the last sync: cast, compare, search. Returns seconds."""
    base, held, chunk = worker._sync()._sender._base, worker.engines["policy"].weights().sources, 1 << 18
    cast = torch.empty(chunk, dtype=next(iter(base.values())).dtype)
    began = time.perf_counter()
    for (name, offsets), before in base.items():
        (elements,) = (box.elements for box in held[name] if box.offsets == offsets)
        for low in range(0, before.numel(), chunk):
            old = before[low : low + chunk]
            now = cast[: old.numel()].copy_(elements[low : low + old.numel()])
            np.flatnonzero(now.view(torch.int16).numpy() != old.view(torch.int16).numpy())
    return time.perf_counter() - began


def num_threads(worker: Any) -> int:
    return torch.get_num_threads()


def reset_peak_memory(worker: Any) -> int:
    """Start to record the peak. Returns the current resident size."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory(worker: Any) -> int:
    """The largest resident size since reset_peak_memory."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
