"""The text of an UnloadedParamsError: all faults between a model's parameters and the tensors that should fill them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from meshrl.core.errors import UnloadedParamsError
from meshrl.core.lookup import similar_names

_SHOWN = 8  # names listed for each kind of fault; the rest is counted
_COMPARED = 1000  # names with which each of them is compared, which takes 0.1 ms a name: files may have 20,000
_NUMBER = re.compile(r"\d+")


class ParamFault(NamedTuple):
    """name: of a tensor or file; text: what follows it. others: the names of the other side, of which the nearest are
    added."""

    name: str
    text: str = ""
    others: Collection[str] = ()

    def __str__(self) -> str:
        # Names with the same numbers (of layers and experts), else those that differ in numbers only, else all.
        numbers, words = _NUMBER.findall(self.name), _NUMBER.sub("", self.name)
        same = [other for other in self.others if _NUMBER.findall(other) == numbers]
        same = same or [other for other in self.others if _NUMBER.sub("", other) == words] or [*self.others]
        near = similar_names(self.name, same[:_COMPARED], 2)
        return f"{self.name}{self.text}" + (f" (nearest there: {', '.join(near)})" if near else "")


def unloaded_params(
    summary: str, faults: Sequence[tuple[str, Sequence[ParamFault]]], advice: str
) -> UnloadedParamsError:
    """faults: (title, faults of this kind)."""
    kinds = []
    for title, of_kind in faults:
        lines = [str(fault) for fault in of_kind[:_SHOWN]]
        lines += [f"and {len(of_kind) - _SHOWN} more"] if len(of_kind) > _SHOWN else []
        if lines:
            kinds.append(f"- {title}:\n" + "\n".join(f"    {line}" for line in lines))
    return UnloadedParamsError("\n".join([summary, *kinds, advice]))
