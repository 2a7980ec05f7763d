"""From the names in a model's files to the hub names of its tensors, by Transformers' own rules.

Files may be of the model without its head, or have names of older versions. A rank reads only its own boxes where the
tensors of the files are views of the module's tensors (`HubNames`). If Transformers computes some of them, it has to
load the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshrl.core.unloaded import ParamFault
from meshrl.model.folder import require_fillable
from meshrl.model.hub_names import HubNames
from meshrl.model.stream import DTYPES, same_values
from meshrl.model.weight_files import UNREADABLE, StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def match_names(
    lm: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    names: HubNames,
    path: str | Path,
    of_files: Sequence[ParamFault] = (),
) -> dict[str, StoredTensor] | str:
    """Hub name -> the tensor of the files, for each of `names`; or the reason, as text, why only Transformers can load
    the files. of_files: the faults of the files themselves.
    """
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
