"""The base of every config slice: a pydantic model that refuses unknown keys and describes each field in one line."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Slice(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)


def field(default: Any, text: str, **limits: Any) -> Any:
    """A config field. text: one line with meaning, unit and reason. limits: pydantic's ge, gt, le and lt."""
    if isinstance(default, (list, dict)):
        return Field(default_factory=lambda: copy.deepcopy(default), description=text, **limits)
    return Field(default, description=text, **limits)
