"""The base of every config slice: a pydantic model that refuses unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Slice(BaseModel):
    """A frozen part of the configuration. Unknown keys are errors. The docstring of a field is its description: one
    sentence with meaning, unit and reason."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
