"""The layers of a config as one, and which key wins where two do not fit each other: that of the stronger layer.
The command line is stronger than the file, the file than its base.

A check states in a Problem which of its keys could be left out (Problem.void). Such a key is left out, with a note, if
another key of the problem is stronger; else the problem is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshrl.config.case import Problem, Value
from meshrl.config.schema import NAME, Key, locate
from meshrl.config.source import CLEARED, REMOVED, Layer, Names, expand, given_in
from meshrl.config.values import scalar, show

DEFAULT = "default"
ARGUMENTS = {  # key of a kind -> where its arguments are; "" = in its own section
    "algo.loss.kind": "",
    "agent.kind": "args.",
    f"reward.terms.{NAME}.kind": "args.",
}


class Layers:
    """The layers of a config, added from the weakest to the strongest: a stronger one replaces values, and sections
    merge.

    values: of all of them. problems: entries to be removed that no weaker layer has.
    """

    def __init__(self, keys: dict[str, Key]):
        self.values: Layer = {}
        self.problems: list[Problem] = []
        self.keys = keys
        self._sections: set[Names] = set()  # that have or had values
        self._strengths: dict[str, int] = {}  # of the layer that gave, removed or left out a key
        self._strength = 0
        self._left_out: dict[str, list[str]] = {}  # reason -> keys with their values and origins

    def add(self, *layers: Layer) -> None:
        """Add one layer, which may be in several parts: those of the command line, one for each override."""
        self._strength += 1
        below = given_in(self.values)
        for layer in layers:
            for names, value in expand(layer, self.keys):
                self._put(names, value, self._strength)
        self.leave_out(list(self._arguments_of_other_kinds(below)))

    def add_objects(self, layer: Layer, strength: int) -> None:
        """Add texts for Python objects. strength: 1 for that of the first layer."""
        for names, value in layer.items():
            self._put(names, value, strength)

    def _put(self, names: Names, value: Value, strength: int) -> None:
        key = ".".join(names)
        self._strengths[key] = strength
        there = [each for each in self.values if each[: len(names)] == names] if names in self._sections else [names]
        removed = [self.values.pop(each, None) for each in there if each != names or value.value in (CLEARED, REMOVED)]
        for above in (names[:i] for i in range(1, len(names))):
            self.values.pop(above, None)
            self._sections.add(above)
        if value.value is REMOVED and not any(removed):
            text = "null and {} remove an entry of a weaker layer, but none has this entry."
            section = names[:-1]
            others = dict.fromkeys(each[len(section)] for each in self.values if each[: len(section)] == section)
            text += f" There are: {', '.join(others)}." if others else ""
            self.problems.append(Problem((key,), text, value.origin))
        elif value.value not in (CLEARED, REMOVED):
            self.values[names] = value

    def leave_out(self, problems: Iterable[Problem]) -> bool:
        """Remove all keys that a stronger one makes void. Returns whether there are any."""
        num_given = len(self.values)
        for problem in problems:
            given = given_in(self.values)
            strengths = {  # of a section: that of its strongest key; 0 = a default
                key: max((s for path, s in self._strengths.items() if f"{path}.".startswith(f"{key}.")), default=0)
                for key in problem.keys
            }
            strongest = max(strengths.values())
            void = [key for key in problem.void if strengths[key] < strongest and _is_given(key, given)]
            if not void:
                continue
            causes = [key for key in problem.keys if strengths[key] == strongest]
            reason = problem.reason or problem.text.partition(". ")[0].removesuffix(".")
            reason = f"left out because of {', '.join(_shown(key, given) for key in causes)}: {reason}."
            self._left_out.setdefault(reason, []).extend(_shown(key, given) for key in void)
            self._strengths |= dict.fromkeys(void, strongest)  # what depends on these keys depends on the causes
            covered = tuple(f"{key}." for key in void)
            self.values = {n: v for n, v in self.values.items() if not f"{'.'.join(n)}.".startswith(covered)}
        return len(self.values) < num_given

    def notes(self) -> list[str]:
        """A note for each reason for which keys were left out."""
        return [
            f"{', '.join(keys)} {'are' if len(keys) > 1 else 'is'} {reason}" for reason, keys in self._left_out.items()
        ]

    def _arguments_of_other_kinds(self, below: dict[str, Value]) -> Iterable[Problem]:
        """Arguments that weaker layers give for another kind of loss, agent or reward than that of the newest layer."""
        given = given_in(self.values)
        for key, value in given.items():
            schema_key, _ = locate(self.keys, key)
            if schema_key is None or schema_key.path not in ARGUMENTS or self._strengths[key] < self._strength:
                continue
            kind = below[key].value if key in below else scalar(schema_key.default or "")
            section = f"{key.rpartition('.')[0]}.{ARGUMENTS[schema_key.path]}"
            weaker = [path for path in given if self._strengths[path] < self._strength]
            arguments = tuple(path for path in weaker if path.startswith(section))
            if kind not in (None, value.value) and arguments:
                yield Problem((key, *arguments), "", void=arguments, reason=f"arguments of {kind}, another kind")


def value_and_origin(key: str, given: dict[str, Value], defaults: dict[str, Any]) -> tuple[str, str]:
    """The value of a key as " = value", which is empty for a section, and its origin."""
    if key in given:
        return f" = {cut(show(given[key].value))}", given[key].origin
    inside = [value.origin for path, value in given.items() if path.startswith(f"{key}.")]
    if inside:
        return "", inside[0]
    if key in defaults:
        return f" = {cut(show(defaults[key]))}", DEFAULT
    return "", DEFAULT if any(path.startswith(f"{key}.") for path in defaults) else "not given"


def cut(text: str) -> str:
    """At most 80 characters of a text."""
    return text if len(text) <= 80 else text[:77] + "..."


def _is_given(key: str, given: dict[str, Value]) -> bool:
    return any(f"{path}.".startswith(f"{key}.") for path in given)


def _shown(key: str, given: dict[str, Value]) -> str:
    value, origin = value_and_origin(key, given, {})
    return f"{cut(key)}{value} [{origin}]" if _is_given(key, given) else f"{key} (left out, too)"
