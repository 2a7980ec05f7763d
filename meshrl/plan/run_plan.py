"""A run as data, made from its config, the model's config.json and the machine, before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from typing import Any

from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.values import show
from meshrl.core.types import POLICY, REFERENCE, RoleSpec
from meshrl.plan.decisions import Decision, Machine, ModelNumbers, decisions
from meshrl.plan.memory import RankMemory
from meshrl.plan.ranks import RankPlan, rank_plan

NO_MACHINE = Machine()
NOTED = ("train.optimizer.lr", "train.max_tokens_per_microbatch", "rollout.max_context_tokens", "algo.correction.kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """config: with each decided value in place of null or auto; the ranks' specs are made from it. decisions: by key,
    also those that are rules for the rank that has the device. roles: what the engines of each train rank are for.
    memory: of each kind of rank; empty = not planned."""

    config: RunConfig | SftRunConfig
    roles: tuple[RoleSpec, ...]
    ranks: tuple[RankPlan, ...]
    decisions: Mapping[str, Decision]
    memory: tuple[RankMemory, ...] = ()

    @property
    def note(self) -> str | None:
        """What is decided and worth a line at the start; None if the config has all of it."""
        used = [each for key, each in self.decisions.items() if key in NOTED and each.value is not None]
        return "decided: " + ", ".join(f"{each.key} {show(each.value)}" for each in used) if used else None

    def with_reasons(self, loaded: Loaded[Any]) -> Loaded[Any]:
        """The config with the decided values, and their reasons, in the origins of null and auto."""
        here = {key: f"{loaded.origins[key]}, here {each.shown}" for key, each in self.decisions.items()}
        return replace(loaded, origins=loaded.origins | here)


def make_plan(
    config: RunConfig | SftRunConfig,
    model: ModelNumbers | None,
    machine: Machine = NO_MACHINE,
    num_ranks: tuple[int, int] | None = None,
) -> RunPlan:
    """model: None = its config.json can't be read; then what follows from it is not decided. num_ranks: that train, and
    that only sample; None = those of the config, an evaluation has others."""
    cluster, tp = config.cluster, config.rollout.tp_size if isinstance(config, RunConfig) else None
    num_train, num_rollout = num_ranks or (cluster.num_train_ranks, 0 if tp is None else cluster.num_rollout_ranks)
    nodes = gcd(cluster.nodes, num_train + num_rollout)  # an evaluation may have fewer ranks
    made = {each.key: each for each in decisions(config, model, machine, nodes)}
    values = {key: each.value for key, each in made.items() if each.value is not None}
    shape = config.train.mesh_shape(num_train)
    ranks = [rank_plan(i, num_train, num_rollout, tp, nodes, shape) for i in range(num_train + num_rollout)]
    roles = (POLICY, REFERENCE) if isinstance(config, RunConfig) and config.algo.kl.coef > 0 else (POLICY,)
    planned = reduce(with_value, values.items(), config)
    return RunPlan(config=planned, roles=roles, ranks=tuple(ranks), decisions=made)


def with_value(part: Any, change: tuple[str, Any]) -> Any:
    """A config, or a part of one, with another value of a key."""
    name, _, rest = change[0].partition(".")
    value = with_value(getattr(part, name), (rest, change[1])) if rest else change[1]
    return part.model_copy(update={name: value})
