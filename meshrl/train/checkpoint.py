"""Tensors of all ranks to a folder and back, for any number of ranks, through torch's distributed checkpointing (DCP).

DCP knows which slice of which tensor a rank holds, saves replicas once, and reads the slices that another layout needs.
Its own storage is not used: that one keeps its index in a pickle, which runs code when it is read. Ours are
safetensors files, one a rank, with the place of each slice in their headers, as DCP's Hugging Face reader expects
them; so no pickle exists, and nothing but a table of names would stand in an index of ours.

Saving has two halves. `stage` (a collective) lets DCP plan and copies the slices to host memory; training may go on
from there. `write` needs no other rank, so a thread can do it.
"""

from __future__ import annotations

import json
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from meshrl.core.errors import CheckpointError
from meshrl.model.weight_files import KINDS
from meshrl.train.checkpoint_files import FileFact, faults, read_manifest, write_file

Tensors = Mapping[str, torch.Tensor]
_SHARDING_INFO = "DCP_SHARDING_INFO"  # where DCP's reader looks for the slices' places


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor, in host memory. offsets: where it starts in the whole tensor."""

    name: str
    offsets: list[int]
    data: torch.Tensor


def stage(tensors: Tensors) -> list[Slice]:
    """This rank's share of the tensors, copied to the host (a collective: names must be the same on all ranks, but
    for plain tensors that only one rank has)."""
    writer = _StagingWriter()
    _checked(dcp.save, dict(tensors), storage_writer=writer)
    return writer.slices


class _StagingWriter(StorageWriter):
    """DCP's storage, up to the point where nothing more is collective: the slices in host memory."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            data = planner.resolve_data(item).detach().contiguous()  # type: ignore[union-attr]
            self.slices.append(Slice(item.index.fqn, list(item.tensor_data.chunk.offsets), data.to("cpu", copy=True)))
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        self.slices = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class BackgroundWrite:
    """`write` in a thread. finish() waits for it, and raises what it raised."""

    def __init__(self, folder: Path, slices: list[Slice]):
        self.name = f"rank_{dist.get_rank():05d}.safetensors"
        self._fact: FileFact | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(folder / self.name, slices), daemon=True)
        self._thread.start()

    def _run(self, path: Path, slices: list[Slice]) -> None:
        try:
            self._fact = write(path, slices)
        except Exception as error:  # a thread's edge: finish() raises it where somebody listens
            self._error = error

    def finish(self) -> tuple[str, FileFact]:
        """The file's name, and what was written. Raises: CheckpointError."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._fact is not None
        return self.name, self._fact


def write(path: Path, slices: list[Slice]) -> FileFact:
    """One safetensors file. Raises: CheckpointError naming it."""
    header: dict[str, Any] = {
        "__metadata__": {_SHARDING_INFO: json.dumps({s.name: {"saved_offsets": s.offsets} for s in slices})}
    }
    at = 0
    for s in slices:
        size = s.data.numel() * s.data.element_size()
        header[s.name] = {
            "dtype": KINDS[s.data.dtype],
            "shape": list(s.data.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned

    def parts() -> Iterator[memoryview]:
        yield memoryview(struct.pack("<Q", len(text)) + text)
        for s in slices:
            if s.data.numel():  # a memoryview can't cast an empty array
                yield memoryview(s.data.reshape(-1).view(torch.uint8).numpy())

    return write_file(path, parts())


class SavedTensors:
    """What a checkpoint holds, proven file by file before anything of it is used.

    Raises, when it is made: CheckpointError naming the file (a collective; every rank raises the same).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = read_manifest(folder)
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = faults(folder, manifest, rank, num_ranks)
        if dist.is_initialized():
            everywhere: list[list[str]] = [[] for _ in range(num_ranks)]
            dist.all_gather_object(everywhere, found)
            found = [text for texts in everywhere for text in texts]
        if found:
            raise CheckpointError("\n".join(dict.fromkeys(found)))
        self._reader = _Reader(folder)
        try:
            self.entries: dict[str, Any] = self._reader.read_metadata().state_dict_metadata  # TensorStorageMetadata
        except Exception as cause:  # files that are as they were written, but were never written by us
            raise CheckpointError(f"{folder} holds files that are no tensors of a checkpoint: {cause}") from cause

    def require(self, tensors: Tensors) -> None:
        """Raises: CheckpointError when these are not, in name, shape and dtype, among what was saved; or when the
        slices of one do not make it whole."""
        missing = [name for name in tensors if name not in self.entries]
        if missing:
            raise CheckpointError(f"{self.folder} lacks {len(missing)} tensors of this model: {_some(missing)}")
        wrong = []
        for name, tensor in tensors.items():
            saved = self.entries[name]
            if saved.size != tensor.shape or saved.properties.dtype != tensor.dtype:
                was, now = (saved.properties.dtype, list(saved.size)), (tensor.dtype, list(tensor.shape))
                wrong.append(f"{name} was {was[0]} {was[1]}, is {now[0]} {now[1]}")
            elif sum(chunk.sizes.numel() for chunk in saved.chunks) != tensor.numel():
                wrong.append(f"{name} is not whole")
        if wrong:
            raise CheckpointError(
                f"{self.folder} is of another model, or of another train.master_dtype: {_some(wrong)}"
            )

    def load(self, tensors: Tensors) -> None:
        """Fill them in place, each rank its own slices (a collective). Raises: CheckpointError, before any is touched,
        as `require`."""
        self.require(tensors)
        alone = not dist.is_initialized()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process reads without it
            _checked(dcp.load, dict(tensors), storage_reader=self._reader, no_dist=alone)


class _Reader(HuggingFaceStorageReader):
    """DCP's own, which parses all headers anew each time it is asked."""

    def __init__(self, folder: Path):
        super().__init__(path=str(folder))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


def _checked(call: Any, *args: Any, **kwargs: Any) -> Any:
    """DCP wraps errors of any rank in a BaseException, which would end a rank in silence."""
    try:
        return call(*args, **kwargs)
    except CheckpointException as cause:
        raise CheckpointError(str(cause)) from cause


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")
