"""The phases of a run: which one a command to a rank belongs to. Their deadlines are `cluster.deadlines` (P26)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from meshrl.monitor.spans import current_span

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "meshrl_phase"


def phase(name: str) -> Callable[[F], F]:
    """Mark a method that ranks are asked to run."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, name)
        return method

    return mark


def phase_of(method: Callable[..., Any]) -> str:
    """The phase of a method, called from where the controller now is; its own name where it is not marked."""
    found: str = getattr(method, _ATTRIBUTE, method.__name__)
    return "eval" if found == "rollout" and current_span() == "eval" else found
