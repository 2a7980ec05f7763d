"""The base of every config slice: pydantic models that refuse unknown keys and have a line about each field."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Slice(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)


def field(default: Any, text: str, **limits: Any) -> Any:
    """A config field: its default, one line of meaning, unit and reason, and pydantic's limits (ge, gt, le, lt)."""
    if isinstance(default, (list, dict)):
        return Field(default_factory=lambda: copy.deepcopy(default), description=text, **limits)
    return Field(default, description=text, **limits)
