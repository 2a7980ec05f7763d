"""From the names in a model's files to the hub names of its tensors, by Transformers' own rules.

Files may be of the model without its head, or have names of older versions. A rank reads only its own boxes where the
tensors of the files are views of the module's tensors (`HubNames`). If Transformers computes some of them, it has to
load the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.lookup import similar_names
from meshrl.model.hub_names import HubNames
from meshrl.model.stream import DTYPES, same_values
from meshrl.model.weight_files import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def match_names(
    lm: PreTrainedModel, stored: Mapping[str, StoredTensor], names: HubNames, path: str | Path
) -> dict[str, StoredTensor] | str:
    """Hub name -> the tensor of the files, for each of `names`; or the reason, as text, why only Transformers can load
    the files.

    Raises: ConfigError when a name is missing or unexpected, with similar names, or a shape or dtype does not fit.
    """
    matched, unexpected, computed = _assign(lm, stored, names)
    if computed:
        return computed
    for alias, first in names.tied.items():
        if first in matched and alias in matched and not same_values(matched[first], matched[alias]):
            return f"config.json ties {matched[alias].name} and {matched[first].name}, which differ in the files"
        if alias in matched:
            matched.setdefault(first, matched[alias])
            del matched[alias]
    wanted, own = lm.state_dict(), names.module_names
    for name, entry in matched.items():
        _require_fit(name, entry, names.tensors[name], wanted[own[name]], type(lm).__name__)
    missing = [name for name in names.tensors if name not in matched]
    refused = [name for name in missing if not _matches(lm._keys_to_ignore_on_load_missing, own[name])]
    if refused:
        raise ConfigError(
            f"model.path {str(path)!r}: no file holds {refused[0]!r} of {type(lm).__name__}"
            f"{_and_more(refused)}{_nearest(refused[0], unexpected)}. config.json and the files are of different "
            "models, or a file is missing"
        )
    if unexpected:
        entry = stored[unexpected[0]]
        raise ConfigError(
            f"{entry.file} holds {entry.name!r}, which {type(lm).__name__} does not have{_and_more(unexpected)}"
            f"{_nearest(entry.name, names.tensors)}. config.json and the files are of different models; remove a head "
            "of another task first"
        )
    return f"{missing[0]} is in no file, and Transformers makes it" if missing else matched


def _assign(
    lm: Any, stored: Mapping[str, StoredTensor], names: HubNames
) -> tuple[dict[str, StoredTensor], list[str], str]:
    """Hub name -> tensor of the files; the names in the files that fit no tensor; and the reason why only Transformers
    can load the files ("" = none).

    Raises: ConfigError when two tensors of the files have one hub name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, wanted = lm.base_model_prefix, lm.state_dict()
    ignored = [*(lm._keys_to_ignore_on_load_unexpected or ())]
    buffers = [name for name, _ in lm.named_buffers()]  # older files hold some that are now computed
    ignored += [rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if any(b.endswith(name) for b in buffers)]
    matched: dict[str, StoredTensor] = {}
    unexpected = []
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
            return {}, [], f"{target} is computed from {name}"
        hub_name = (spelled or candidates)[0]
        if hub_name in matched:
            other = matched[hub_name]
            raise ConfigError(
                f"{other.file}: {other.name!r} and {name!r} are both the weight {hub_name!r}; remove one of them"
            )
        matched[hub_name] = stored[name]
    return matched, unexpected, ""


def _require_fit(name: str, entry: StoredTensor, shape: tuple[int, ...], wanted: torch.Tensor, model: str) -> None:
    """Raises: ConfigError when a tensor of the files has another shape or kind than the model's."""
    if entry.shape != shape:
        raise ConfigError(
            f"{entry.file}: {entry.name!r} has shape {list(entry.shape)!s:.80}, but with config.json {name!r} of "
            f"{model} has shape {list(shape)}. The file and config.json are of different models"
        )
    dtype = DTYPES.get(entry.kind)
    if dtype is None or dtype.is_floating_point != wanted.is_floating_point():
        raise ConfigError(
            f"{entry.file}: {entry.name!r} is stored as {entry.kind}, but {model} needs {wanted.dtype} there. "
            "Quantized weights can't be trained; give a folder with the weights in BF16, F16 or F32"
        )


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    near = similar_names(name, names, 2)
    return f"; nearest: {', '.join(near)}" if near else ""
