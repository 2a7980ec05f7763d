"""All checks of a config whose keys and types are right. Checks of one section are in the file of its slice; this file
has those of several sections, of keys without effect, and of choices that this version does not have. All of them run
before torch is imported.

Each check yields Problems: which keys, what is wrong, what to do. None raises, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.config.algo import ADVANTAGE_NAMES, LOSS_KIND, LossConfig, algorithm_problems, correction_of_auto
from meshrl.config.case import Case, Problem, Purpose
from meshrl.config.cluster import NOT_IN_SFT, ONLY_OF_PROCESSES, machine_problems
from meshrl.config.data import data_problems
from meshrl.config.loop import loop_problems
from meshrl.config.model import model_problems
from meshrl.config.monitor import sink_problems
from meshrl.config.rollout import engine_problems
from meshrl.config.run import RunConfig, SftRunConfig, run_problems
from meshrl.config.train import train_problems
from meshrl.config.values import show
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, similar_names


def check(case: Case) -> list[Problem]:
    """All problems of a config whose keys and types are right."""
    checks = [_not_in_this_version, _aliases, _unused, train_problems, model_problems, run_problems]
    checks += [machine_problems, sink_problems]
    if isinstance(case.config, RunConfig):
        checks += [data_problems, loop_problems, _kinds, engine_problems, algorithm_problems]
    return [problem for each in checks for problem in each(case)]


def unused(config: RunConfig | SftRunConfig) -> dict[str, str]:
    """Keys that have no effect with the other choices -> why. Setting one is an error; --explain marks them."""
    found: dict[str, str] = {}
    of_command = _unused_in_sft() if isinstance(config, SftRunConfig) else _unused_in_rl(config)
    for section, names, why in (*_unused_in_both(config), *of_command):
        found |= {f"{section}.{name}": why for name in names.split()}
    return found


Unused = Iterator[tuple[str, str, str]]
"""(section, names of its keys separated by blanks, why they have no effect) ..."""


def _unused_in_both(config: RunConfig | SftRunConfig) -> Unused:
    executor = config.cluster.executor
    if executor != "ray":
        yield "cluster", "address", f"cluster.executor is {executor}"
    if executor == "inline":
        why = "cluster.executor is inline: the only rank is this process"
        yield "cluster", "max_restarts", why
        yield "cluster.deadlines", ONLY_OF_PROCESSES, why
    if not config.model.lora.enabled:
        yield "model.lora", "rank alpha targets", "model.lora is off"
    if config.train.scheduler.kind == "constant":
        yield "train.scheduler", "min_lr_ratio", "train.scheduler.kind is constant"
    if "wandb" not in config.monitor.sinks:
        yield "monitor", "wandb_project", "monitor.sinks has no wandb"


def _unused_in_sft() -> Unused:
    yield "cluster", "num_rollout_ranks", "SFT samples nothing"
    yield "monitor", "rollout_log_every_steps", "SFT samples nothing"
    yield "cluster.deadlines", NOT_IN_SFT, "SFT has no such phase"
    yield "train", "updates_per_step", "an SFT step is one optimizer step"


def _unused_in_rl(config: RunConfig) -> Unused:
    data, rollout, kind = config.data, config.rollout, config.loop.kind
    if data.sources:
        names = "split subset format" if data.eval_path is None else "split"
        yield "data", names, "each of data.sources names its own"
    if data.map is not None:
        yield "data", "prompt answer", "data.map makes the prompt of each row"
    for name, source in data.sources.items():
        if source.map or data.map:
            by = f"data.sources.{name}.map" if source.map else "data.map"
            yield f"data.sources.{name}", "prompt answer", f"{by} makes the prompt of each row"
    if data.eval_path is None:
        yield "data", "eval_split eval_limit", "data.eval_path is null"
        yield "loop", "eval_samples save_best", "data.eval_path is null"
    if kind != "fully_async":
        yield "loop", "in_flight oversampling", f"loop.kind is {kind}"
    for engine, server in (("vllm", rollout.vllm), ("sglang", rollout.sglang), ("endpoint", rollout.endpoint)):
        if rollout.engine != engine:
            yield f"rollout.{engine}", " ".join(type(server).model_fields), f"rollout.engine is {rollout.engine}"
    if rollout.engine == "sglang" and rollout.sglang.url is not None:
        names = "python args mem_fraction_static start_deadline_s"
        yield "rollout.sglang", names, "the server at rollout.sglang.url already runs"
    if rollout.engine == "endpoint" and rollout.endpoint.weights == "none":
        yield "rollout.endpoint", "reload_url folder", "rollout.endpoint.weights is none"
    if config.cluster.num_rollout_ranks:
        why = "cluster.num_rollout_ranks is above 0: samplers have devices of their own"
        yield "rollout", "release_memory", why
    else:
        yield "rollout", "sync_transport", "cluster.num_rollout_ranks is 0"
    yield from _unused_in_algo(config)


def _unused_in_algo(config: RunConfig) -> Unused:
    algo, (correction, why) = config.algo, config.correction
    if algo.kl.coef == 0:
        yield "algo.kl", "estimator place", "algo.kl.coef is 0"
    if algo.aggregation != "constant_length":
        yield "algo", "constant_length", f"algo.aggregation is {algo.aggregation}"
    if algo.advantage != "grpo":
        without = "which does not divide by the group's std"
        yield "algo", "advantage_eps", f"algo.advantage is {algo.advantage}, {without}"
    if correction == "off":
        yield "algo.correction", "level low high", f"algo.correction.kind is {why}"
    if algo.correction.rejection.measure == "off":
        yield "algo.correction.rejection", "level low high", "algo.correction.rejection.measure is off"


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
        if key in case.given and case.given[key].value not in possible:
            choices = " or ".join(show(value) for value in possible if value is not None)
            yield Problem((key,), f"not possible: {why}. Use {choices}.")


ALIASES = {
    "train.tensor_model_parallel_size": "train.mesh.tp",
    "rollout.tensor_model_parallel_size": "rollout.mesh.infer_tp",
}


def _aliases(case: Case) -> Iterator[Problem]:
    for alias, key in ALIASES.items():
        if alias in case.given and key in case.given and case.given[alias].value not in (None, case.given[key].value):
            text = "these are two names of one number, with different values: give only one of them."
            yield Problem((alias, key), text)


def _unused(case: Case) -> Iterator[Problem]:
    for key, why in unused(case.config).items():
        if key in case.given and case.given[key].value is not None:
            yield Problem((key,), f"would have no effect: {why}. Remove this key, or change the other one.")


def _kinds(case: Case) -> Iterator[Problem]:
    """Problems of everything that is named by a word of a table or by a dotted path."""
    config = case.rl
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
        names = known.get(table, set())
        if kind in names:
            continue
        if DOTTED_PATH.fullmatch(kind):
            if not can_be_imported(kind):
                yield Problem((key,), f"no such module, neither installed nor in the working folder {Path.cwd()}.")
        elif names or not kind.isidentifier():
            close = similar_names(kind, names)
            meant = f" Nearest: {', '.join(close)}." if close else ""
            choices = f"one of {', '.join(sorted(names))}" if names else "a name"
            yield Problem((key,), f"must be {choices}, or a dotted path package.module:name.{meant}")


def notices(config: RunConfig | SftRunConfig, purpose: Purpose) -> list[str]:
    """Notices about settings that are allowed, but may surprise a reader of the config."""
    found = []
    if isinstance(config, RunConfig) and purpose == "train" and (turns := _ranks_in_turn(config)) is not None:
        found.append(turns)
    if isinstance(config, RunConfig) and config.rollout.engine == "sglang":
        found.append(
            "rollout.engine is sglang, which is experimental: it was tested with a simulated server, and never with "
            "SGLang itself. In the first steps look at sync/proven_wire, sync/proven_read_back and "
            "proof/logprob_abs_diff_mean."
        )
    if isinstance(config, RunConfig) and purpose == "train" and config.algo.correction.kind == "off":
        used, why = correction_of_auto(config.loop.staleness, config.rollout.engine)
        if used == "truncate":
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
    if config.train.optimizer.lr is None and purpose != "eval" and config.peak_lr != RunConfig.DEFAULT_LR:
        what = " with model.lora" if config.model.lora.enabled else ""
        found.append(
            f"train.optimizer.lr is not set: its default for {'SFT' if purpose == 'sft' else 'RL'}{what} is "
            f"{config.peak_lr:g}."
        )
    if config.train.master_dtype == "bfloat16":
        found.append(
            f"train.master_dtype is bfloat16: steps of lr {config.peak_lr:g} are lost in rounding wherever "
            "they are below 1/512 of a weight, and partly up to 1/256; float32 master weights keep them."
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
    if rollout.engine == "endpoint" or rollout.sglang.url is not None:
        return (
            f"{_count(train, 'train')} and the server at rollout.{rollout.engine}.url run in turn: each waits while "
            "the other works, because loop.kind=colocated samples with the newest weights only."
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
