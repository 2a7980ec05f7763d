"""Save the tensors of all ranks in a folder and load them, with any number of ranks and any sharding.

Each rank writes one safetensors file for each trained role, with the boxes that it holds; the file's metadata has the
offsets of each box and the shapes of the full tensors. The first box of a tensor has the tensor's name, further boxes
have NAME@OFFSETS, so that torch's own reader of distributed checkpoints can read the files of a role whose ranks hold
one box of each tensor.
Replicas, which hold the same boxes, write a part each. A rank that loads reads what it needs of each box from any file;
there is no separate index, and no pickle.

Saving has two steps. `stage` (a collective) copies the boxes to host memory, so that training may continue; those of
the last state are not copied if they are there already. `write` needs no other rank, so a thread can do it.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshrl.core.errors import CheckpointError
from meshrl.core.files import Unreadable
from meshrl.model.folder import KINDS, not_finite, opened
from meshrl.parallel.boxes import Box, Values, boxes, index_of, overlap, replica
from meshrl.parallel.exchange import all_gather_json
from meshrl.train.checkpoint_files import FileFact, faults, read_manifest, write_file

Tensors = Mapping[str, torch.Tensor]
_SHAPES = "shapes"  # in a file's metadata: name -> shape of the full tensor
_OFFSETS = "DCP_SHARDING_INFO"  # in a file's metadata: key -> offsets of the box, as torch's reader expects them
_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of a tensor, in host memory. shape: of the full tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor


def stage(tensors: Tensors, readable: Values = torch.Tensor.detach, copy: bool = True) -> list[StoredSlice]:
    """This rank's share of the tensors on the host (a collective: all ranks need the same names, except plain tensors
    that only one rank has). readable: as in `boxes`. copy: also what is in host memory."""
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    # A plain tensor is saved by the first rank that has it.
    before = {name for names in all_gather_json(plain)[: dist.get_rank()] for name in names}
    slices = []
    for number, (name, tensor) in enumerate(tensors.items()):
        index, count = replica(tensor)
        if number % count == index if isinstance(tensor, DTensor) else name not in before:
            for offsets, values in boxes(tensor, readable):
                data = values.contiguous().to("cpu", copy=copy)
                slices.append(StoredSlice(name, offsets, tuple(tensor.shape), data))
    return slices


def write_in_background(folder: Path, role: str, slices: list[StoredSlice]) -> Future[tuple[str, FileFact]]:
    """`write` this rank's file of a role in a thread, which does not keep the process alive. The result is the file's
    name, size and hash."""
    name, written = f"{role}_rank_{dist.get_rank():05d}.safetensors", Future[tuple[str, FileFact]]()

    def run() -> None:
        try:
            written.set_result((name, write(folder / name, slices)))
        except Exception as error:  # result() raises it in the caller's thread
            written.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return written


def write(path: Path, slices: list[StoredSlice]) -> FileFact:
    """Write one safetensors file."""
    bad = [s.name for s in slices if not_finite({s.name: s.data})]
    if bad:
        raise CheckpointError(
            f"{path} is not written: these tensors have values that are not finite: {_some(bad)}. The training has "
            "diverged. Lower train.optimizer.lr, and continue from the last checkpoint with run.resume=auto"
        )
    header: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    at = 0
    for s in slices:
        key = s.name if s.name not in header else f"{s.name}@{','.join(map(str, s.offsets))}"
        size = s.data.numel() * s.data.element_size()
        header[key] = {"dtype": KINDS[s.data.dtype], "shape": list(s.data.shape), "data_offsets": [at, at + size]}
        offsets[key] = {"saved_offsets": s.offsets}
        at += size
    shapes = {s.name: s.shape for s in slices}
    header["__metadata__"] = {_SHAPES: json.dumps(shapes), _OFFSETS: json.dumps(offsets)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned

    def parts() -> Iterator[memoryview]:
        yield memoryview(struct.pack("<Q", len(text)) + text)
        for s in slices:
            yield memoryview(s.data.reshape(-1).view(torch.uint8).numpy().data)

    return write_file(path, parts())


@dataclass(slots=True)
class SavedTensor:
    """One tensor of a checkpoint. pieces: (file, key in the file, box) of each saved box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Path, str, Box]] = field(default_factory=list)


class SavedTensors:
    """The tensors of a role in a checkpoint. The constructor (a collective) verifies every file before any
    of it is used; every rank raises the same faults."""

    def __init__(self, folder: Path, role: str):
        self.folder = folder
        manifest = read_manifest(folder)
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        problems = [text for texts in all_gather_json(faults(folder, manifest, rank, num_ranks)) for text in texts]
        if problems:
            raise CheckpointError("\n".join(dict.fromkeys(problems)))
        self.entries: dict[str, SavedTensor] = {}
        for file in sorted(folder / name for name in manifest.files if name.startswith(f"{role}_rank_")):
            try:
                self._read_header(file)
            except (AttributeError, LookupError, TypeError, ValueError) as cause:
                # The hash is right, but the file was not written by `write`.
                raise CheckpointError(f"{file} holds no tensors of a checkpoint: {cause}") from cause

    def _read_header(self, file: Path) -> None:
        with opened(file) as reader:
            shapes, places = (json.loads(reader.metadata()[key]) for key in (_SHAPES, _OFFSETS))
            if sorted(places) != sorted(reader.keys()):
                raise ValueError(f"its metadata lists {len(places)} boxes, but it holds others")
            for key, saved in places.items():
                name = key if key in shapes else key.rpartition("@")[0]
                piece = reader.get_slice(key)
                offsets = tuple(map(int, saved["saved_offsets"]))
                shape, dtype = tuple(map(int, shapes[name])), _DTYPES[piece.get_dtype()]
                entry = self.entries.setdefault(name, SavedTensor(shape, dtype))
                box = (offsets, tuple(piece.get_shape()))
                inside = len(offsets) == len(shape) and overlap(box, ((0,) * len(shape), shape)) == box
                if (entry.shape, entry.dtype) != (shape, dtype) or not inside:
                    raise ValueError(f"{key} of {dtype} {box[1]} is no box of {entry.dtype} {entry.shape}")
                entry.pieces.append((file, key, box))

    def require(self, tensors: Tensors) -> None:
        """Raises: CheckpointError when a tensor was not saved with this name, shape and dtype, or lacks boxes."""
        missing = [name for name, tensor in tensors.items() if name not in self.entries and tensor.numel()]
        if missing:
            raise CheckpointError(f"{self.folder} lacks {len(missing)} tensors of this model: {_some(missing)}")
        wrong = []
        for name, tensor in tensors.items():
            saved = self.entries.get(name, SavedTensor(tuple(tensor.shape), tensor.dtype))  # empty: no boxes
            if saved.shape != tuple(tensor.shape) or saved.dtype != tensor.dtype:
                was, now = (saved.dtype, list(saved.shape)), (tensor.dtype, list(tensor.shape))
                wrong.append(f"{name} was {was[0]} {was[1]}, is {now[0]} {now[1]}")
            elif sum(prod(shape) for _, _, (_, shape) in saved.pieces) != tensor.numel():
                wrong.append(f"{name} is not complete")
        if wrong:
            raise CheckpointError(
                f"{self.folder} is of another model, or of another train.master_dtype: {_some(wrong)}"
            )

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Fill the tensors in place; each rank reads its own boxes (a collective, if there is a process group)."""
        self.require(tensors)
        own = [name for name, _, part in self._parts(tensors) if not_finite({name: part})]
        bad = dict.fromkeys(name for names in all_gather_json(own) for name in names)
        if bad:
            raise CheckpointError(
                f"{self.folder} contains values that are not finite in {_some(list(bad))}: the training had diverged "
                "when it was saved. Continue from an earlier checkpoint (run.resume=FOLDER) with a lower "
                "train.optimizer.lr"
            )
        for _, target, part in self._parts(tensors):
            target.copy_(part)

    def _parts(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, part of this rank's shard, its saved values) for each overlap with a saved box."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for name, tensor in tensors.items():
                for local in boxes(tensor):
                    for file, key, saved in self.entries[name].pieces:
                        shared = overlap(local.box, saved)
                        if shared is None:
                            continue
                        try:
                            if file not in files:
                                files[file] = stack.enter_context(opened(file))
                            # safetensors can't slice a tensor without dims.
                            index = index_of(shared, saved[0])
                            part = files[file].get_slice(key)[index] if index else files[file].get_tensor(key)
                        except Unreadable as cause:
                            raise CheckpointError(f"{file}: {cause}") from cause
                        yield name, local.tensor[index_of(shared, local.offsets)], part


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")
