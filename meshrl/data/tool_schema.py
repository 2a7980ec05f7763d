"""A function as chat templates describe it to a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from meshrl.core.errors import DataError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """name, description, and parameters as a JSON schema with `required`, from the function's types and its docstring
    in Google style, which has a description of each parameter under `Args:`.

    Raises: DataError, with a text that follows the function's name, when a part is missing.
    """
    from transformers.utils import get_json_schema

    try:
        parameters = inspect.signature(function).parameters.values()
        if bad := [parameter.name for parameter in parameters if parameter.kind not in _BY_NAME]:
            raise DataError(f"its parameters {bad} can't be given by name, as a model gives them")
        described = get_json_schema(function)["function"]
    except DataError:
        raise
    except Exception as cause:  # Transformers evaluates the user's annotations
        raise DataError(f"it can't be described to the model: {cause}") from cause
    return {name: described[name] for name in ("name", "description", "parameters")}
