"""From the names in a model's files to those of its modules, by Transformers' own rules.

Where the rules rename, or lay whole tensors end to end (the experts of a layer), a rank can read the rows it holds.
Where they compute (transpose, interleave, split), only Transformers can load the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.lookup import similar_names
from meshrl.model.stream import DTYPES, Parts, same_values
from meshrl.model.weight_files import Stored

_Found = dict[str, dict[str, list[Stored]]]  # model name -> source pattern of the rule ("" = none) -> tensors in order


def match_names(
    lm: torch.nn.Module, stored: Mapping[str, Stored], tied: Mapping[str, str], path: str | Path
) -> dict[str, Parts] | str:
    """Model name -> the tensors its values are made of, for each parameter (a tied one under its first name) and each
    persistent buffer; or, in words, why only Transformers can load them. tied: alias -> first name.

    Raises: ConfigError when a name is missing or unexpected, or a shape or dtype does not fit, naming the nearest.
    """
    wanted = lm.state_dict()
    found, unexpected, converters = _sorted_in(lm, stored, wanted)
    parts: dict[str, Parts] = {}
    for name, by_pattern in found.items():
        joined = _joined(name, by_pattern, converters)
        if joined is None:
            return f"{name} is made of {_first(by_pattern).name} by a computation"
        pieces, shape = joined
        _require_fit(name, pieces, shape, wanted[name], type(lm).__name__)
        first = tied.get(name, name)
        if first in parts and not (len(parts[first]) == len(pieces) == 1 and same_values(parts[first][0], pieces[0])):
            return f"config.json ties {parts[first][0].name} and {pieces[0].name}, which differ in the files"
        parts[first] = pieces
    missing = [name for name in dict.fromkeys(tied.get(name, name) for name in wanted) if name not in parts]
    refused = [name for name in missing if not _matches(lm._keys_to_ignore_on_load_missing, name)]
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
            f"{_nearest(entry.name, wanted)}. config.json and the files are of different models; a head of another "
            "task has to be taken off first"
        )
    return f"{missing[0]} is in no file, and Transformers makes it" if missing else parts


def _sorted_in(
    lm: Any, stored: Mapping[str, Stored], wanted: Mapping[str, torch.Tensor]
) -> tuple[_Found, list[str], dict[str, Any]]:
    """What belongs to each name, the names that belong to none, and the converters by source pattern."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(lm)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = lm.base_model_prefix
    ignored = [*(lm._keys_to_ignore_on_load_unexpected or ())]
    buffers = [name for name, _ in lm.named_buffers()]  # old files hold what is now made anew, at other places
    ignored += [rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if any(b.endswith(name) for b in buffers)]
    found: _Found = {}
    unexpected = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target in wanted:
            found.setdefault(target, {}).setdefault(pattern or "", []).append(stored[name])
        elif not _matches(ignored, target):
            unexpected.append(name)
    return found, unexpected, {pattern: rule for rule in converters for pattern in rule.source_patterns}


def _joined(
    name: str, by_pattern: dict[str, list[Stored]], converters: Mapping[str, Any]
) -> tuple[Parts, tuple[int, ...]] | None:
    """The tensors in the order in which they lie end to end, and the shape they make; None when that is not enough.

    Raises: ConfigError when two tensors are meant for one place, or some of a list are missing.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    one = _first(by_pattern)
    if "" in by_pattern:
        everything = [entry for entries in by_pattern.values() for entry in entries]
        if len(everything) > 1:
            raise ConfigError(f"{one.file} holds {one.name!r}, but {everything[1].name!r} is meant for {name!r} too")
        return (one,), one.shape
    rule = converters[next(iter(by_pattern))]
    operations = [(type(op), getattr(op, "dim", None)) for op in rule.operations]
    if operations not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return None
    lists = [by_pattern.get(pattern, []) for pattern in rule.source_patterns]
    if len({len(entries) for entries in lists}) > 1 or any(
        entry.shape != entries[0].shape for entries in lists for entry in entries
    ):
        counts = ", ".join(f"{len(e)} of {pattern}" for pattern, e in zip(rule.source_patterns, lists, strict=True))
        raise ConfigError(f"{one.file}: {name!r} wants equally many tensors of equal shapes, but there are {counts}")
    rows = sum(entries[0].shape[0] for entries in lists)
    pieces = tuple(entry for expert in zip(*lists, strict=True) for entry in expert)
    return pieces, (len(lists[0]), rows, *one.shape[1:])


def _require_fit(name: str, pieces: Parts, shape: tuple[int, ...], wanted: torch.Tensor, model: str) -> None:
    """Raises: ConfigError when a tensor of the files has another shape or kind than the model's."""
    one = pieces[0]
    if shape != tuple(wanted.shape):
        raise ConfigError(
            f"{one.file}: {one.name!r} makes {name!r} {list(shape)}, but config.json makes it {list(wanted.shape)} in "
            f"{model}. They are of different models"
        )
    for piece in pieces:
        dtype = DTYPES.get(piece.kind)
        if dtype is None or dtype.is_floating_point != wanted.is_floating_point():
            raise ConfigError(
                f"{piece.file}: {piece.name!r} is stored as {piece.kind}, but {model} needs {wanted.dtype} there. "
                "Quantised weights can't be trained; give the folder in BF16, F16 or F32"
            )


def _first(by_pattern: dict[str, list[Stored]]) -> Stored:
    return next(iter(by_pattern.values()))[0]


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    near = similar_names(name, names, 2)
    return f"; nearest: {', '.join(near)}" if near else ""
