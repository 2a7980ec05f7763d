"""A model's values from its files: which tensor of the files is which of the model's, by Transformers' own rules, and
the values, in small pieces.

Files may be of the model without its head, or have names of older versions. A rank reads only its own boxes where the
tensors of the files are views of the module's tensors (`HubNames`). If Transformers computes some of them, it has to
load the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.files import Unreadable, open_plain
from meshrl.core.unloaded import ParamFault
from meshrl.model.folder import KINDS, UNREADABLE, StoredTensor, not_finite, not_finite_error, require_fillable
from meshrl.model.hub_names import HubNames, persistent_buffers
from meshrl.model.lora import is_adapter, named_weights
from meshrl.parallel.boxes import boxes, index_of, replica, send_to_copies
from meshrl.parallel.fsdp import local_shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        of extra host memory, whatever the size of a tensor."""
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


def match_names(
    lm: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    names: HubNames,
    path: str | Path,
    of_files: Sequence[ParamFault] = (),
) -> dict[str, StoredTensor] | str:
    """Hub name -> the tensor of the files, for each of `names`; or the reason, as text, why only Transformers can load
    the files. of_files: the faults of the files themselves."""
    matched, unexpected, twice, computed = _assign(lm, stored, names)
    wanted, own, tied = lm.state_dict(), names.module_names, list[tuple[StoredTensor, StoredTensor]]()
    faults: dict[str, list[ParamFault]] = {"files": [*of_files], "twice": twice, "shape": [], "dtype": []}
    for hub_name, entry in matched.items():
        first = names.tied.get(hub_name, hub_name)
        if kind := _misfit(entry, names.tensors[first], wanted[own[first]]):
            shape, dtype = list(names.tensors[first]), str(wanted[own[first]].dtype).removeprefix("torch.")
            in_file = f"{entry.kind} {list(entry.shape)!s:.80} in {entry.file.name}"
            faults[kind].append(ParamFault(entry.name, f" is {in_file}, but {dtype} {shape} in the model"))
    for alias, first in names.tied.items():
        if alias in matched:
            tied.append((matched[alias], matched.setdefault(first, matched[alias])))
            del matched[alias]
    made = computed.keys() | (names.computed.keys() if computed else set())  # one of the files' tensors may be several
    missing = [name for name in names.tensors if name not in matched and own[name] not in made]
    refused = [name for name in missing if not _matches(lm._keys_to_ignore_on_load_missing, own[name])]
    faults["missing"] = [ParamFault(name, f" {list(names.tensors[name])}", unexpected) for name in refused]
    faults["unexpected"] = [
        ParamFault(name, f" {list(stored[name].shape)!s:.80} in {stored[name].file.name}", refused or names.tensors)
        for name in unexpected
    ]
    require_fillable(path, type(lm).__name__, faults)
    for module_name, source in computed.items():
        return f"{module_name} is computed from {source}"
    for alias_entry, entry in tied:
        if entry is not alias_entry and not same_values(entry, alias_entry):
            return f"config.json ties {alias_entry.name} and {entry.name}, which differ in the files"
    return f"{missing[0]} is in no file, and Transformers makes it" if missing else matched


def _assign(
    lm: Any, stored: Mapping[str, StoredTensor], names: HubNames
) -> tuple[dict[str, StoredTensor], list[str], list[ParamFault], dict[str, str]]:
    """Hub name -> tensor of the files; the names in the files that fit no tensor; the tensors of which two have one hub
    name; and module name -> a name in the files, for the tensors that only Transformers can compute."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, wanted = lm.base_model_prefix, lm.state_dict()
    ignored = [*(lm._keys_to_ignore_on_load_unexpected or ())]
    buffers = [name for name, _ in lm.named_buffers()]  # older files hold some that are now computed
    ignored += [rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if any(b.endswith(name) for b in buffers)]
    matched, unexpected, twice = dict[str, StoredTensor](), list[str](), list[ParamFault]()
    others: dict[str, list[str]] = {}  # module name -> names in the files that are not its hub names
    for name in sorted(stored, key=dot_natural_key):
        target, _ = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, _ = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            if not _matches(ignored, target):
                unexpected.append(name)
            continue
        candidates = names.of(target)
        spelled = [n for n in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if n in candidates]
        if not spelled and (len(candidates) > 1 or target in names.computed):
            others.setdefault(target, []).append(name)
            continue
        hub_name = (spelled or candidates)[0]
        if hub_name in matched:
            twice.append(ParamFault(name, f" and {matched[hub_name].name} are both the weight {hub_name}"))
        matched.setdefault(hub_name, stored[name])
    computed = {}
    for target, sources in others.items():
        if target not in names.computed and any(name in matched for name in names.of(target)):
            unexpected += sources  # such as an expert more than the model has
        else:
            computed[target] = sources[0]
    return matched, unexpected, twice, computed


def _misfit(entry: StoredTensor, shape: tuple[int, ...], wanted: torch.Tensor) -> str:
    """The kind of fault of a tensor of the files: "shape", "dtype", or "" if it fits or can't be read."""
    dtype = DTYPES.get(entry.kind)
    if entry.kind == UNREADABLE:
        return ""
    if entry.shape != shape:
        return "shape"
    return "dtype" if dtype is None or dtype.is_floating_point != wanted.is_floating_point() else ""


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
