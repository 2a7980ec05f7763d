"""A model's values, read from its safetensors files in small pieces: a rank reads only the boxes that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, open_plain
from meshrl.model.folder import not_finite, not_finite_error
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import is_adapter, named_weights
from meshrl.model.weight_files import KINDS, StoredTensor
from meshrl.parallel.boxes import boxes, index_of, replica, send_to_copies
from meshrl.parallel.fsdp import local_shard

BUCKET_BYTES = 64 << 20  # host memory in addition to the shard; much smaller buckets read at full speed, too
DTYPES = {kind: dtype for dtype, kind in KINDS.items() if kind[:2] != "F8"}  # float8 needs a scale


class StoredWeights:
    """The tensors of the files with a model's values, by hub name, for each of `names`. Only `fill` reads data."""

    def __init__(self, stored: dict[str, StoredTensor], names: HubNames):
        self.stored, self._names = stored, names

    @torch.no_grad()
    def fill(self, lm: torch.nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Fill a model with its values, cast to the parameters' dtype; of a sharded tensor, only this rank's boxes. One
        of several ranks with the same boxes reads them, and sends them to the others (a collective). Takes one bucket
        of extra host memory, whatever the size of a tensor.
        """
        tensors = _values_of(lm)
        sources = [
            (self.stored[hub_name], offsets, values)
            for name, tensor in tensors.items()
            if replica(tensor)[0] == 0
            for local in boxes(tensor)
            for hub_name, offsets, values in self._names.split(name, local.offsets, local.tensor)
        ]
        bucket = torch.empty(bucket_bytes, dtype=torch.uint8)
        with ExitStack() as stack:
            reader = _Reader(stack, bucket)
            for stored, offsets, values in sorted(sources, key=lambda each: (str(each[0].file), each[0].offset)):
                for first, part in _contiguous_parts(offsets, values, stored.shape):
                    reader.read(stored, first, part)
        for tensor in tensors.values():
            send_to_copies(tensor)


class LoadedWeights:
    """The values of another model: one that only Transformers could load, with all of them in host memory, or one that
    is sharded like those to fill."""

    def __init__(self, lm: torch.nn.Module):
        self._values = _values_of(lm)

    @torch.no_grad()
    def fill(self, lm: torch.nn.Module) -> None:
        """As StoredWeights.fill."""
        for name, tensor in _values_of(lm).items():
            source = self._values[name]
            if local_shard(source) is not source:
                local_shard(tensor).copy_(local_shard(source))
                continue
            for local in boxes(tensor):
                local.tensor.copy_(source[index_of(local.box)])


def _values_of(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the files of a model hold, by the names of its modules."""
    return {name: p for name, p in named_weights(lm) if not is_adapter(name)} | persistent_buffers(lm)


def _contiguous_parts(
    offsets: tuple[int, ...], values: torch.Tensor, shape: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """The contiguous parts of a box in a tensor of this shape: (flat index of the first value, the values)."""
    step = prod(shape[1:])
    if values.dim() <= 1 or (tuple(values.shape[1:]) == shape[1:] and values.is_contiguous()):
        yield offsets[0] * step if shape else 0, values.view(-1)
        return
    for row, inner in enumerate(values, offsets[0]):
        for first, part in _contiguous_parts(offsets[1:], inner, shape[1:]):
            yield row * step + first, part


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of the files are equal; compares them in small pieces."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    step = BUCKET_BYTES // torch.float64.itemsize
    with ExitStack() as stack:
        reader = _Reader(stack, torch.empty(BUCKET_BYTES, dtype=torch.uint8))
        for begin in range(0, one.numel, step):
            pieces = [torch.empty(min(step, one.numel - begin), dtype=DTYPES[one.kind]) for _ in (one, other)]
            for stored, piece in zip((one, other), pieces, strict=True):
                reader.read(stored, begin, piece)
            if not torch.equal(*pieces):
                return False
    return True


class _Reader:
    """Reads through one bucket; keeps each file open until the exit of the stack."""

    def __init__(self, stack: ExitStack, bucket: torch.Tensor):
        self._stack, self._bucket = stack, bucket
        self._files: dict[Path, BinaryIO] = {}

    def read(self, stored: StoredTensor, first: int, into: torch.Tensor) -> None:
        """Fill `into` with the values first, first + 1, ... of a tensor of the files."""
        dtype = DTYPES[stored.kind]
        range_of = into.dtype if into.is_floating_point() else torch.float32
        step = len(self._bucket) // dtype.itemsize
        for at in range(0, into.numel(), step):
            part = into[at : at + step]
            piece = self._bucket[: part.numel() * dtype.itemsize]
            self._bytes(stored, (first + at) * dtype.itemsize, piece)
            if not_finite({stored.name: piece.view(dtype)}, range_of):
                raise not_finite_error(str(stored.file), stored.name, range_of)
            # First move, then cast: across devices, copy_ would cast on the host, into a second bucket.
            part.copy_(piece.view(dtype).to(into.device))

    def _bytes(self, part: StoredTensor, first: int, piece: torch.Tensor) -> None:
        try:
            if part.file not in self._files:
                self._files[part.file] = self._stack.enter_context(open_plain(part.file))
            file = self._files[part.file]
            file.seek(part.offset + first)
            got = file.readinto(piece.numpy())  # type: ignore[attr-defined]
        except (OSError, Unreadable) as cause:
            raise ConfigError(f"{part.file}: {part.name!r} can't be read: {cause}") from cause
        if got != len(piece):
            raise ConfigError(f"{part.file} ends within {part.name!r}: it was changed after its header was read")
