"""Reinforcement-learning post-training of language models. `train`, `sft` and `evaluate` are the commands in Python."""

# First, the subpackage: if it were imported later, it would take the place of the function of the same name.
from meshrl import train as _subpackage  # noqa: F401
from meshrl.api import Run, __version__, evaluate, sft, train

__all__ = ["Run", "__version__", "evaluate", "sft", "train"]
