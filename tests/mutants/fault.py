"""The description of a fault of `make mutants` (mutation testing)."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One edit, `old` to `new`, of one file. tests: at least one of them must fail with this edit."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
