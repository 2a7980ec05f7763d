"""Checks of reward functions before a run starts, made together with the checks of the config."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator

from meshrl.config.case import Case, Problem
from meshrl.config.kinds import REWARDS
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import DOTTED_PATH, can_be_imported
from meshrl.reward.kinds import make_grader


def check_graders(in_memory: Collection[str], case: Case) -> Iterator[Problem]:
    """Problems of reward functions that can't be imported, or that a run can't call. in_memory: terms whose function is
    given by a Python caller. Kinds that name no function are reported by the config's own check.

    Modules that only this check imports are removed from sys.modules, so that the check of the next config in this
    process reads their files again.
    """
    before = set(sys.modules)
    for name, term in case.rl.reward.terms.items():
        is_path = DOTTED_PATH.fullmatch(term.kind) and can_be_imported(term.kind)
        if name in in_memory or not (term.kind in REWARDS or is_path):
            continue
        try:
            make_grader(name, term.kind, term.args)
        except ConfigError as error:
            yield Problem((f"reward.terms.{name}.kind",), f"{error}.")
        module = term.kind.partition(":")[0]
        if module not in before:
            sys.modules.pop(module, None)
