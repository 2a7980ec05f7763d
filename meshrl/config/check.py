"""All checks of a config whose keys and types are right. Checks of one section are in the file of its slice; this file
checks several sections together, and choices that this version does not have. All of them run before torch is imported.

Each check yields Problems: which keys, what is wrong, what to do. None raises, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshrl.config.algo import ADVANTAGE_NAMES, LOSS_KIND, LossConfig, algorithm_problems, unused_algo_keys
from meshrl.config.cluster import machine_problems, rank_problems, unused_cluster_keys
from meshrl.config.data import data_problems, unused_data_keys
from meshrl.config.loop import loop_problems, unused_loop_keys
from meshrl.config.model import model_problems
from meshrl.config.monitor import sink_problems
from meshrl.config.rollout import engine_problems, unused_engine_keys
from meshrl.config.run import RunConfig, SftRunConfig, run_problems
from meshrl.config.source import Problem, Value
from meshrl.config.train import train_problems
from meshrl.config.values import show
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, similar_names

Purpose = Literal["train", "eval", "sft"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Input of the checks. given: the values of files and command line by dotted key; all other keys have defaults.

    known: names of the reward and agent tables, {"reward": {...}, "agent": {...}}; without an entry only the form of
    a kind is checked. Its entry "needs_answer" has the reward kinds that need the answer of a row. rows: rows in
    memory, by the config key that they replace.
    """

    config: RunConfig | SftRunConfig
    given: dict[str, Value]
    folder: Path
    purpose: Purpose
    known: dict[str, set[str]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Check = Callable[[Case], Iterable[Problem]]


def check(case: Case) -> list[Problem]:
    """All problems of a config whose keys and types are right."""
    config, training = case.config, case.purpose == "train"
    checks = [_not_in_this_version, _aliases, _unused, train_problems, model_problems, run_problems, machine_problems]
    problems = [problem for each in checks for problem in each(case)]
    if case.purpose != "eval":  # an evaluation only prints
        problems += sink_problems(config.monitor)
    if isinstance(config, RunConfig):
        problems += [*data_problems(case, config), *loop_problems(config, case.purpose == "eval")]
        problems += [*_kinds(case, config), *rank_problems(config)]
        problems += [*engine_problems(case.given, config, case.purpose), *algorithm_problems(config.algo, training)]
    return problems


def value_of(config: Any, path: str) -> Any:
    """The value under a dotted key; KeyError where the config has no such key."""
    for name in path.split("."):
        if isinstance(config, dict):
            config = config[name]
        elif name in type(config).model_fields:
            config = getattr(config, name)
        else:
            raise KeyError(path)
    return config


def has_key(config: RunConfig | SftRunConfig, path: str) -> bool:
    """Whether this kind of config has the key's section at all: an SFT run has no rollout.*."""
    return path.partition(".")[0] in type(config).model_fields


def unused(config: RunConfig | SftRunConfig) -> dict[str, str]:
    """Keys that have no effect with the other choices -> why. Setting one is an error; --explain marks them."""
    found = unused_cluster_keys(config.cluster, isinstance(config, SftRunConfig))
    if not config.model.lora.enabled:
        found |= dict.fromkeys((f"model.lora.{name}" for name in ("rank", "alpha", "targets")), "model.lora is off")
    if config.train.scheduler.kind == "constant":
        found["train.scheduler.min_lr_ratio"] = "train.scheduler.kind is constant"
    if "wandb" not in config.monitor.sinks:
        found["monitor.wandb_project"] = "monitor.sinks has no wandb"
    if isinstance(config, SftRunConfig):
        return found | {"train.updates_per_step": "an SFT step is one optimizer step"}
    if config.data.eval_path is None:
        for key in ("loop.eval_samples", "loop.save_best"):
            found[key] = "data.eval_path is null"
    if config.cluster.num_rollout_ranks:
        found["rollout.release_memory"] = "cluster.num_rollout_ranks is above 0: samplers have devices of their own"
    else:
        found["rollout.sync_transport"] = "cluster.num_rollout_ranks is 0"
    found |= unused_loop_keys(config.loop)
    found |= unused_algo_keys(config.algo, *config.correction)
    return unused_data_keys(config.data) | unused_engine_keys(config.rollout) | found


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {  # key -> (what this version can do, why nothing else)
    "model.dtype": (("bfloat16", "float32"), "float16 gradients need loss scaling, which this version does not have"),
    "model.vision": (("shard",), "this version trains text models only, which have no vision tower"),
    "train.mesh.ulysses": ((1,), "this version does not split rows over ranks yet; lower the limits of row lengths"),
    "train.mesh.tp": ((1,), "this version has no tensor parallelism in training yet; shard with train.mesh.dp_shard"),
    "train.tensor_model_parallel_size": ((None, 1), "this version has no tensor parallelism in training yet"),
    "rollout.pipeline_model_parallel_size": ((1,), "no rollout engine here splits a model into pipeline stages"),
}


def _not_in_this_version(case: Case) -> Iterator[Problem]:
    for key, (possible, why) in ONLY.items():
        if has_key(case.config, key) and value_of(case.config, key) not in possible:
            choices = " or ".join(show(value) for value in possible if value is not None)
            yield Problem((key,), f"not possible: {why}. Use {choices}.")


ALIASES = {
    "train.tensor_model_parallel_size": "train.mesh.tp",
    "rollout.tensor_model_parallel_size": "rollout.mesh.infer_tp",
}


def _aliases(case: Case) -> Iterator[Problem]:
    for alias, key in ALIASES.items():
        if alias in case.given and key in case.given and case.given[alias].value not in (None, case.given[key].value):
            yield Problem(
                (alias, key), "these are two names of one number, with different values: give only one of them."
            )


def _unused(case: Case) -> Iterator[Problem]:
    for key, why in unused(case.config).items():
        if key in case.given and case.given[key].value is not None:
            yield Problem((key,), f"would have no effect: {why}. Remove it, or change that.")


def _kinds(case: Case, config: RunConfig) -> Iterator[Problem]:
    terms = config.reward.terms
    if not terms:
        yield Problem(("reward.terms",), "without a reward there is nothing to learn: name at least one term.")
    elif not any(term.weight for term in terms.values()):
        weights = tuple(f"reward.terms.{name}.weight" for name in terms)
        yield Problem(weights, "all weights are 0, so every reward would be 0.")
    named = [("reward", f"reward.terms.{name}.kind", term.kind) for name, term in terms.items()]
    named.append(("agent", "agent.kind", config.agent.kind))
    known: dict[str, set[str]] = {**case.known, "advantage": set(ADVANTAGE_NAMES), "loss": {LossConfig().kind}}
    if case.purpose == "train":
        named += [("advantage", "algo.advantage", config.algo.advantage), ("loss", LOSS_KIND, config.algo.loss.kind)]
    for table, key, kind in named:
        names = known.get(table)
        if DOTTED_PATH.fullmatch(kind) and kind not in (names or ()):
            if not can_be_imported(kind):
                yield Problem((key,), f"no such module, neither installed nor in the working folder {Path.cwd()}.")
            continue
        if (names is None and kind.isidentifier()) or kind in (names or ()):
            continue
        close = similar_names(kind, names or ())
        meant = f" Nearest: {', '.join(close)}." if close else ""
        choices = f" one of {', '.join(sorted(names))}" if names else " a name"
        yield Problem((key,), f"must be{choices}, or a dotted path package.module:name.{meant}")


def notices(config: RunConfig | SftRunConfig, purpose: Purpose) -> list[str]:
    """Notices about settings that are allowed, but may surprise a reader of the config."""
    found = []
    if isinstance(config, RunConfig) and purpose == "train" and (turns := _ranks_in_turn(config)) is not None:
        found.append(turns)
    if isinstance(config, RunConfig) and config.rollout.engine == "sglang":
        found.append(
            "rollout.engine is sglang, which is experimental: it was tested with a simulated server, and never with "
            "SGLang itself. Look at the three proofs of the first steps (docs/rollout_engines.md)."
        )
    if isinstance(config, RunConfig) and purpose == "train" and config.algo.correction.kind == "off":
        used, why = config.correction_of_auto
        if used != "off":
            found.append(
                f"algo.correction.kind is off, although {why}: the loss treats samples of another policy as its own "
                "(docs/correction.md). auto corrects this."
            )
    attention = config.model.attn_implementation
    if attention != "auto":
        found.append(
            f"model.attn_implementation is {attention}: trainer and sampler share one packed attention over torch's "
            "scaled_dot_product_attention, which picks its kernel (flash where the hardware has it) by itself."
        )
    if config.train.master_dtype == "bfloat16":
        found.append(
            f"train.master_dtype is bfloat16: steps of lr {config.train.optimizer.lr:g} are lost in rounding wherever "
            "they are below 1/256 of a weight; float32 master weights keep them."
        )
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    if longest is not None and longest > budget:
        found.append(
            f"the longest row may have {longest} tokens, above train.max_tokens_per_microbatch = {budget}: rows are "
            "never split, so such a row is a micro-batch of its own."
        )
    return found


def _ranks_in_turn(config: RunConfig) -> str | None:
    """The notice that train ranks and separate sampler ranks take turns; None if the same ranks do both."""
    train, samplers, rollout = config.cluster.num_train_ranks, config.cluster.num_rollout_ranks, config.rollout
    if not samplers or config.loop.kind != "colocated":
        return None
    url = {"endpoint": "rollout.endpoint.url", "sglang": "rollout.sglang.url"}.get(rollout.engine)
    if url is not None and (rollout.engine == "endpoint" or rollout.sglang.url is not None):
        return (
            f"{_count(train, 'train')} and the server at {url} run in turn: each waits while the other works, because "
            "loop.kind=colocated samples with the newest weights only."
        )
    turns = f"{_count(train, 'train')} and {_count(samplers, 'sampler')} run in turn: each waits while the other works"
    total = train + samplers
    change = f"set cluster.num_train_ranks={total} and cluster.num_rollout_ranks=0 to use all {total} for both"
    overlap = "loop.kind=one_step_off or fully_async lets them work at the same time (docs/schedules.md)"
    if rollout.engine == "embedded":
        return f"{turns}; {overlap}, or {change}."
    return (
        f"{turns}; {overlap}. Separate ranks are needed where the training state and the {rollout.engine} server do "
        "not fit on one device together. Where they do (rollout.release_memory=true frees the server's memory while "
        f"the trainer works), {change}."
    )


def _count(num_ranks: int, kind: str) -> str:
    return f"{num_ranks} {kind} rank{'' if num_ranks == 1 else 's'}"
