"""The inputs of a run: a checked config and, from a Python caller, objects in place of names in the config. No torch is
imported."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from meshrl.agent.loop import Agent
from meshrl.agent.resolve import (
    AGENTS,
    AgentFunction,
    FunctionAgent,
    as_agent,
    require_parameters,
    resolve_agent,
    shown,
)
from meshrl.cluster.worker import prepare_ranks
from meshrl.config.base import value_of
from meshrl.config.case import Check
from meshrl.config.kinds import REWARDS
from meshrl.config.load import InMemory, Loaded, Source, load_run_config, load_sft_config
from meshrl.config.precedence import DEFAULT
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import COMMAND_LINE
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.terminal import print_message
from meshrl.data.check import check_data, count_rows
from meshrl.data.tables import RowTable, is_dataset
from meshrl.reward.self_test import check_graders

C = TypeVar("C", RunConfig, SftRunConfig)
OnStep = Callable[[int, dict[str, float]], Any]
"""Called after each step with its number, from 1, and its metrics. False ends the run after this step."""
WriteReport = Callable[[Path], object]
"""Called with the run's folder after all other files are written."""
ROWS = {"data.path": "data", "data.eval_path": "eval_data", "sft.path": "data", "sft.eval_path": "eval_data"}
"""Key -> the argument for its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """The objects of a Python caller. rewards: reward functions by the name of their term. rows: by the key in ROWS
    that they replace. quiet: print nothing. saves: whether models and checkpoints are written."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    agent: Agent | None = None
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    on_step: OnStep | None = None
    quiet: bool = False
    saves: bool = True

    def table(self, key: str) -> RowTable | None:
        """The rows in memory that replace this key; None if the config names a path."""
        return RowTable(ROWS[key], self.rows[key]) if key in self.rows else None

    def in_memory(self) -> InMemory:
        """The texts for these objects in the resolved config: names of functions and agents, numbers of rows."""
        values: dict[str, Any] = {}
        for key, rows in self.rows.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = f"<{len(rows)} rows given as {ROWS[key]}>"
        if self.rewards:
            values["reward"] = {"terms": {term: {"kind": _name_of(f)} for term, f in self.rewards.items()}}
        if self.agent is not None:
            values["agent"] = {"kind": _name_of(self.agent)}
        return InMemory(values=values, rows=self.rows, unused=() if self.agent is None else ("agent.args",))


NO_OBJECTS = Objects()


class StepCallback:
    """A sink that calls `on_step` once for each training step, and `end_early` when that returns False. An evaluation
    makes no separate call, so that a call always has the metrics of a step: the eval/* metrics are added to those of
    all later steps, until the next evaluation. An exception of `on_step` ends the run like any other error."""

    def __init__(self, on_step: OnStep, end_early: Callable[[], None]):
        self._on_step, self._end_early = on_step, end_early
        self._evaluation: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float], units: Mapping[str, str]) -> None:
        evaluation = {name: value for name, value in values.items() if name.partition("/")[0] == "eval"}
        if evaluation:
            self._evaluation = evaluation
            return
        answer = self._on_step(step, {**self._evaluation, **values})
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise MeshrlError(f"on_step returned {answer!r}; allowed: None or True to continue, False to end the run")
        if answer is not None and not answer:
            self._end_early()

    def close(self, failed: bool = False) -> None:
        pass


Rewards = Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]] | Callable[..., Any]
"""Reward functions by the name of their term, or functions whose names are those of their terms."""


def objects_of(
    rewards: Rewards | None = None,
    agent: Agent | AgentFunction | None = None,
    rows: Mapping[str, Iterable[Any] | None] | None = None,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> Objects:
    """Check a caller's arguments. rows: None for a key = the config contains its path."""
    by_term = _by_term(rewards)
    for term, function in by_term.items():
        if not callable(function):
            raise ConfigError(
                f"rewards[{term!r}] is {shown(function)}; it must be a function of (completion, answer). The name of "
                f"a reward belongs in the config, as reward.terms.{term}.kind"
            )
    if on_step is not None and (not callable(on_step) or inspect.iscoroutinefunction(on_step)):
        raise ConfigError(f"on_step is {shown(on_step)}; it must be a plain function of (step, metrics)")
    if on_step is not None:
        require_parameters("on_step", on_step, "step", "metrics")
    given_rows = {key: value for key, value in (rows or {}).items() if value is not None}
    for key, value in given_rows.items():
        if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable):
            raise ConfigError(
                f"{ROWS[key]} is {shown(value)}; it must be a list of rows, each a dict {{column: value}}. A path "
                f"belongs in the config, as {key}"
            )
    return Objects(
        rewards=by_term,
        agent=None if agent is None else as_agent(agent, "agent"),
        rows={key: value if is_dataset(value) else list(value) for key, value in given_rows.items()},
        on_step=on_step,
        quiet=quiet,
    )


def _by_term(rewards: Rewards | None) -> Mapping[str, Callable[..., Any]]:
    if rewards is None or isinstance(rewards, Mapping):
        return rewards or {}
    functions = [rewards] if callable(rewards) else rewards
    names = [getattr(each, "__name__", "") for each in functions] if isinstance(functions, list | tuple) else []
    if not names or len({*names}) < len(names) or not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"rewards is {shown(rewards)}; it must be a function, a list of functions with different names, or a dict "
            "{name of the term: function}, which a lambda needs"
        )
    return dict(zip(names, functions))


def load_run(
    source: Source,
    overrides: Sequence[str] = (),
    purpose: Literal["train", "eval"] = "train",
    objects: Objects = NO_OBJECTS,
    starts: bool | None = True,
    of_run: Path | None = None,
) -> Loaded[RunConfig]:
    """The checked config. The check constructs rewards and built-in agents from their args, but not a user's agent.
    starts: False where the run starts later, or elsewhere. of_run: as in load_run_config."""
    names = {
        "reward": {*REWARDS, *(_name_of(function) for function in objects.rewards.values())},
        "agent": {*AGENTS, *(() if objects.agent is None else (_name_of(objects.agent),))},
    }
    checks: list[Check] = [check_data, partial(check_graders, objects.rewards)]

    def load(overrides: Sequence[str]) -> Loaded[RunConfig]:
        return load_run_config(source, overrides, names, purpose, objects.in_memory(), checks, starts, of_run)

    loaded = load(overrides) if purpose == "eval" else _in_steps(load, overrides, objects)
    if loaded.config.agent.kind in AGENTS:
        resolve_agent(loaded.config.agent)
    return loaded


def load_sft(
    source: Source, overrides: Sequence[str] = (), objects: Objects = NO_OBJECTS, starts: bool | None = True
) -> Loaded[SftRunConfig]:
    """The checked config of an SFT run. starts: as in load_run."""

    def load(overrides: Sequence[str]) -> Loaded[SftRunConfig]:
        return load_sft_config(source, overrides, objects.in_memory(), [check_data], starts)

    return _in_steps(load, overrides, objects)


def _in_steps(load: Callable[[Sequence[str]], Loaded[C]], overrides: Sequence[str], objects: Objects) -> Loaded[C]:
    """The config, in which a number of epochs has become one of steps."""
    loaded = load(overrides)
    config, key, origins = loaded.config, loaded.config.NUM_STEPS_KEY, dict(loaded.origins)
    in_epochs = key.replace("num_steps", "num_epochs")
    epochs, steps = value_of(config, in_epochs), value_of(config, key)
    if epochs is None and origins[key] == DEFAULT:  # null replaces the epochs of a file
        raise ConfigError(f"{loaded.path}: {key} is required, but not given")
    if epochs is None:
        return loaded
    is_on_line = origins[in_epochs] == COMMAND_LINE
    if origins[key] != DEFAULT and (origins[key] == COMMAND_LINE) == is_on_line:
        raise ConfigError(f"{loaded.path}: {key} and {in_epochs} are two ways to write one number; give only one")
    if origins[key] == DEFAULT or is_on_line:
        data, prompts = ("sft", "sft.rows") if isinstance(config, SftRunConfig) else ("data", "loop.prompts")
        given = objects.rows.get(f"{data}.path")
        rows = count_rows(config) if given is None else len(given)
        if rows is None:
            raise ConfigError(f"{in_epochs} needs rows that can be counted at the start; give {key} in its place")
        rows = round(rows * (1 - (value_of(config, f"{data}.eval_fraction") or 0)))
        steps = max(1, round(epochs * rows / value_of(config, f"{prompts}_per_step")))
        origins[key] = f"{origins[in_epochs]}, {epochs:g} epochs of {rows:,} rows"
    origins[in_epochs] = f"written as {key}"
    loaded = load([*overrides, f"{key}={steps}", f"{in_epochs}=null"])
    return replace(loaded, origins=origins)


def begin(loaded: Loaded[RunConfig] | Loaded[SftRunConfig], quiet: bool) -> None:
    """Print the config's notices, and start the imports of the ranks before this process imports torch."""
    for notice in () if quiet else loaded.notices:
        print_message(f"note: {notice}")
    prepare_ranks(loaded.config.cluster)


def _name_of(thing: Any) -> str:
    """The text for an object in the resolved config: module and name of the function, or of the object's class."""
    thing = thing.function if isinstance(thing, FunctionAgent) else thing
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
