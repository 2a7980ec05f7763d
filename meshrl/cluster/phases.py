"""The phases of a run: each command to a rank belongs to one. Their deadlines are in `cluster.deadlines` (P26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from meshrl.monitor.spans import current_span

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "meshrl_phase"


def phase(name: str) -> Callable[[F], F]:
    """Mark a method that the controller calls in ranks with its phase."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, name)
        return method

    return mark


def phase_of(method: Callable[..., Any]) -> str:
    """The phase of a method when the controller calls it now; the method's name if it is not marked."""
    found: str = getattr(method, _ATTRIBUTE, method.__name__)
    return "eval" if found == "rollout" and current_span() == "eval" else found
