"""Facts about model families that neither Transformers' class nor its config states in a form that code can read; and
the packages that add families.

Transformers' class computes everything except attention and the head, which meshrl computes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from math import prod
from typing import Any

PLUGINS = "meshrl.models"  # the group of the entry points of packages that add families

HEAD_SCALES: dict[str, Callable[[float], float]] = {  # a key of configs -> from its value to the factor of the logits
    "logit_scale": float,  # Cohere
    "logits_scaling": lambda value: 1.0 / value,  # Granite
}

# Model types of mixtures whose routers' output is not (logits, scores, selected experts), or its reverse: DBRX returns
# logits alone, and Gemma 4 probabilities in their place.
OTHER_ROUTERS = ("dbrx", "gemma4_text")


def head_scale(config: Any) -> float:
    """The factor of the logits. A key that a config does not have, or whose value is None or 0, has no effect."""
    return prod(scale(value) for key, scale in HEAD_SCALES.items() if (value := getattr(config, key, None)))


@cache
def import_plugins() -> None:
    """Import the installed packages that add families; before a config is read."""
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
