"""The base of every config slice: a pydantic model that refuses unknown keys; and what makes a field void, as metadata
of the field."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict


class Slice(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors. The docstring of a field is its description: one
    sentence with meaning, unit and reason."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Unless:
    """The field, or each key of the section, has no effect while another key has this value."""

    key: str
    value: object
    reason: str = "{key} is {value}"
    also: str = ""
    """other keys, separated by blanks, that must have this value or be empty, too"""

    def is_void(self, value: object) -> bool:
        return value in (self.value, {})


class OnlyWith(Unless):
    """It has an effect only while another key has this value."""

    def is_void(self, value: object) -> bool:
        return value != self.value


@dataclass(frozen=True, slots=True)
class NotInSft:
    """It has no effect in `meshrl sft`."""

    reason: str


COLOCATED = OnlyWith(
    "cluster.num_rollout_ranks", 0, "cluster.num_rollout_ranks is above 0: samplers have devices of their own"
)
EVALUATED = Unless("data.eval_path", None, also="data.eval_fraction data.eval_sets")
OF_SAMPLING = NotInSft("SFT samples nothing")


def value_of(config: Slice, key: str) -> Any:
    """The value of a dotted key, whose sections are slices."""
    return reduce(getattr, key.split("."), config)
