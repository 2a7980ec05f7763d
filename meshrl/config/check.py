"""All checks of a config whose keys and types are right. Checks of one section are in the file of its slice; this file
has those of several sections, of keys without effect, and of choices that this version does not have. All of them run
before torch is imported.

Each check yields Problems: which keys, what is wrong, what to do. None raises, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshrl.config.algo import (
    LOSS_ARGS,
    LOSS_KIND,
    LossConfig,
    algorithm_problems,
    correction_of_auto,
)
from meshrl.config.base import NotInSft, Slice, Unless, value_of
from meshrl.config.case import Case, Problem, Purpose, name_problems
from meshrl.config.cluster import machine_problems
from meshrl.config.data import data_problems
from meshrl.config.kinds import ADVANTAGES
from meshrl.config.loop import loop_problems
from meshrl.config.model import missing_files, model_problems
from meshrl.config.monitor import missing_clients, sink_problems
from meshrl.config.rollout import engine_problems, missing_server
from meshrl.config.run import RunConfig, SftRunConfig, run_problems
from meshrl.config.source import COMMAND_LINE, dotted, leaves
from meshrl.config.train import MOST_TOKENS, train_problems
from meshrl.config.values import show
from meshrl.core.processor import products_of_16_bits_are_slow
from meshrl.core.terminal import counted

OWN_DEVICE_SHARE = 0.9  # of the memory of a device that only a sampler uses


def check(case: Case) -> list[Problem]:
    """All problems of a config whose keys and types are right."""
    checks = [_not_in_this_version, _aliases, _unused, train_problems, model_problems, run_problems]
    checks += [machine_problems, sink_problems]
    if isinstance(case.config, RunConfig):
        checks += [data_problems, loop_problems, _kinds, engine_problems, algorithm_problems]
    return [problem for each in checks for problem in each(case)]


def unused(config: RunConfig | SftRunConfig) -> dict[str, tuple[str, str]]:
    """Keys that have no effect with the other choices -> (the reason, the keys that are the reason). The fields state
    most of them (`base.Unless`)."""
    keys = dict(_void_fields(config, config, ""))
    for section, names, reason, causes in _unused_by_several(config) if isinstance(config, RunConfig) else ():
        keys |= {f"{section}.{name}": (reason, causes) for name in names.split()}
    for sink, key in ("wandb", "wandb_project"), ("prometheus", "prometheus_port"):
        if sink not in config.monitor.sinks:
            keys[f"monitor.{key}"] = f"monitor.sinks has no {sink}", "monitor.sinks"
    return keys


def _void_fields(config: Slice, part: Slice, path: str) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, info in type(part).model_fields.items():
        key, inner, why = dotted(path, name), getattr(part, name), None
        for rule in info.metadata:
            if isinstance(rule, NotInSft) and isinstance(config, SftRunConfig):
                why = rule.reason, ""
            elif isinstance(rule, Unless) and why is None:
                value, causes = value_of(config, rule.key), f"{rule.key} {rule.also}".split()
                if all(rule.is_void(value_of(config, cause)) for cause in causes):
                    shown = value if isinstance(value, str) else show(value)
                    why = rule.reason.format(key=rule.key, value=shown), " ".join(causes)
        if isinstance(inner, Slice) and why is None:
            yield from _void_fields(config, inner, key)
        elif why is not None:
            yield from ((each, why) for each in leaves({key: inner.model_dump() if isinstance(inner, Slice) else None}))


def _unused_by_several(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """(section, names of its keys separated by blanks, why they have no effect, the keys that are the reason) for keys
    that more than the value of one other key makes void."""
    data, algo, (correction, reason) = config.data, config.algo, config.correction
    without_eval = not data.is_evaluated
    if data.sources:
        names = "split subset format" if without_eval else "split"
        yield "data", names, "each of data.sources names its own", "data.sources"
    if data.map is not None:
        yield "data", "prompt answer", "data.map makes the prompt of each row", "data.map"
    for key, source in data.named().items():
        if source.map or data.map:
            by = f"{key}.map" if source.map else "data.map"
            yield key, "prompt answer", f"{by} makes the prompt of each row", by
    for column in ("prompt", "answer") if data.sources and without_eval and data.map is None else ():
        if all(source.map or getattr(source, column) for source in data.sources.values()):
            yield "data", column, "each of data.sources names its own", "data.sources"
    if not without_eval and config.eval_sampling.temperature == 0:
        is_set = config.rollout.eval_sampling.temperature == 0
        key = "rollout.eval_sampling.temperature" if is_set else "loop.eval_samples"
        yield "rollout.eval_sampling", "top_p top_k min_p", "evaluations are greedy", key
    if algo.kl.coef == 0 and config.train.updates_per_step == 1:
        causes = "algo.kl.coef train.updates_per_step"
        yield "cluster.deadlines", "annotate", "algo.kl.coef is 0, one update per step", causes
    if (kind := algo.loss.kind) in LOSS_ARGS:
        others = {name for args in LOSS_ARGS.values() for name in args if name not in LOSS_ARGS[kind]}
        yield "algo.loss", " ".join(sorted(others)), f"algo.loss.kind is {kind}", LOSS_KIND
    if not any(kind in ADVANTAGES and ADVANTAGES[kind].divides_by_std for kind in algo.advantages.values()):
        without = "which does not divide by the group's std"
        yield "algo", "advantage_eps", f"algo.advantage is {algo.advantage}, {without}", "algo.advantage"
    if correction == "off":
        by_auto = " loop.kind loop.max_staleness rollout.engine" if algo.correction.kind == "auto" else ""
        yield "algo.correction", "level low high", f"algo.correction.kind is {reason}", f"algo.correction.kind{by_auto}"


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {  # key -> (what this version can do, why nothing else)
    "model.dtype": (("bfloat16", "float32"), "float16 gradients need loss scaling, which this version does not have"),
    "rollout.pipeline_model_parallel_size": ((1,), "no rollout engine here splits a model into pipeline stages"),
}


def _not_in_this_version(case: Case) -> Iterator[Problem]:
    for key, (possible, reason) in ONLY.items():
        if key in case.given and case.given[key].value not in possible:
            choices = " or ".join(show(value) for value in possible if value is not None)
            yield Problem((key,), f"not possible: {reason}. Use {choices}.")


ALIASES = {
    "train.tensor_model_parallel_size": "train.mesh.tp",
    "rollout.tensor_model_parallel_size": "rollout.mesh.infer_tp",
}


def _aliases(case: Case) -> Iterator[Problem]:
    for alias, key in ALIASES.items():
        if alias in case.given and key in case.given and case.given[alias].value not in (None, case.given[key].value):
            reason = "these are two names of one number, with different values"
            yield Problem((alias, key), f"{reason}: give only one of them.", void=(alias, key), reason=reason)


def _unused(case: Case) -> Iterator[Problem]:
    for key, (reason, causes) in unused(case.config).items():
        if key in case.given and case.given[key].value is not None:
            text = f"would have no effect: {reason}. Remove this key, or change the other one."
            yield Problem((key, *causes.split()), text, void=(key,), reason=f"no effect, since {reason}")


def _kinds(case: Case) -> Iterator[Problem]:
    """Problems of everything that is named by a word of a table or by a dotted path."""
    config = case.rl
    terms = config.reward.terms
    if config.agent.kind not in ("single_turn", "multi_turn"):
        pass  # the agent may give rewards
    elif not terms:
        yield Problem(("reward.terms",), "without a reward there is nothing to learn: name at least one term.")
    elif not any(term.weight for term in terms.values()):
        weights = tuple(f"reward.terms.{name}.weight" for name in terms)
        yield Problem(weights, "all weights are 0, so every reward would be 0.")
    named = [("reward", f"reward.terms.{name}.kind", term.kind) for name, term in terms.items()]
    named.append(("agent", "agent.kind", config.agent.kind))
    tables: dict[str, set[str]] = {**case.table_names, "advantage": {*ADVANTAGES}, "loss": {*LOSS_ARGS}}
    if case.purpose == "train":
        named += [("advantage", key, kind) for key, kind in config.algo.advantages.items()]
        named.append(("loss", LOSS_KIND, config.algo.loss.kind))
    for table, key, kind in named:
        yield from name_problems(key, kind, tables.get(table, set()))


def defaults_of_the_machine(case: Case) -> dict[str, tuple[object, str]]:
    """Defaults that depend on the CPU or the placement: the value of each such key that is not given, and the
    reason."""
    config, defaults = case.config, dict[str, tuple[object, str]]()
    if _computes_slowly(case):
        reason = "this CPU has no fast products of 16-bit numbers, so bfloat16 takes many times as long"
        defaults["model.dtype"] = "float32", reason
    if isinstance(config, RunConfig) and config.cluster.num_rollout_ranks and config.rollout.uses_device:
        name = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}.get(config.rollout.engine)
        if name is not None and (config.rollout.engine == "sglang" or config.rollout.vllm.kv_cache_bytes is None):
            reason = "cluster.num_rollout_ranks is above 0: samplers have devices of their own"
            defaults[f"rollout.{config.rollout.engine}.{name}"] = OWN_DEVICE_SHARE, reason
    return {key: default for key, default in defaults.items() if key not in case.given}


def _computes_slowly(case: Case) -> bool:
    """Whether the run's ranks are on the CPU of this machine, and it is slow in 16 bits. Ranks of Ray may have other
    machines."""
    return case.starts is not None and case.config.cluster.executor != "ray" and products_of_16_bits_are_slow()


def notices(case: Case) -> list[str]:
    """Notices about settings that are allowed, but may surprise a reader of the config."""
    config, purpose = case.config, case.purpose
    texts = list(_not_in_evaluation(case)) if purpose == "eval" else []
    section, _, name = config.NUM_STEPS_KEY.partition(".")
    num_steps = getattr(getattr(config, section), name)
    for key in (f"{section}.eval_every_steps", f"{section}.save_every_steps") if purpose != "eval" else ():
        if key in case.given and (case.given[key].value or 0) > num_steps:
            ends = ", and is evaluated before the first and after the last" if key == "loop.eval_every_steps" else ""
            texts.append(f"{_shown(case, key)} is never reached: the run has {counted(num_steps, 'step')}{ends}.")
    if (default := defaults_of_the_machine(case).get("model.dtype")) is not None:
        texts.append(f"model.dtype is {default[0]}, since {default[1]}. Set model.dtype to override this.")
    elif config.model.dtype != "float32" and _computes_slowly(case):
        texts.append(
            f"model.dtype is {config.model.dtype}, and this CPU has no fast products of 16-bit numbers: float32 is "
            "many times faster here."
        )
    if case.starts is False and "model.path" in case.given and (path := case.find("model.path")[0]) is not None:
        texts += [f"model.path: {problem.text} A run needs it." for problem in missing_files(path)]
    if purpose == "train":
        texts += _notices_of_the_loss(case)
        texts += _notices_of_the_reward(case.rl)
    if isinstance(config, RunConfig) and purpose == "train" and (turns := _ranks_in_turn(config)) is not None:
        texts.append(turns)
    texts += [
        f"{each.keys[0]}: {each.text} The machines of the run need it."
        for each in ([] if case.starts else missing_here(config, purpose))
    ]
    if isinstance(config, RunConfig) and config.rollout.engine == "sglang":
        texts.append(
            "rollout.engine is sglang, which was tested with SGLang 0.5.23 on a CPU, with tiny models, and never on a "
            "GPU. In the first steps look at sync/proven_wire, sync/proven_read_back and proof/logprob_abs_diff_mean."
        )
    if isinstance(config, RunConfig) and purpose == "train" and config.algo.correction.kind == "off":
        used, reason = correction_of_auto(config.loop.staleness, config.rollout.engine)
        if used == "truncate":
            texts.append(
                f"algo.correction.kind is off, although {reason}: the loss treats samples of another policy as its own "
                "(docs/correction.md). auto corrects this."
            )
    longest, budget = config.longest_row_tokens, config.train.max_tokens_per_microbatch
    ulysses = config.train.mesh.ulysses
    most = (MOST_TOKENS if budget is None else budget) * ulysses  # the ranks of ulysses share a micro-batch
    if longest is not None and longest > most:
        value = f"{budget}" if budget is not None else f"null, which is at most {MOST_TOKENS}"
        together = f" x {ulysses} ranks of train.mesh.ulysses" if ulysses > 1 else ""
        texts.append(
            f"the longest row may have {longest} tokens, above train.max_tokens_per_microbatch = {value}{together}: "
            "rows are never split, so such a row is a micro-batch of its own."
        )
    return texts


def missing_here(config: RunConfig | SftRunConfig, purpose: Purpose) -> Iterator[Problem]:
    """What a run needs and this machine lacks. An evaluation uses no trackers."""
    yield from () if purpose == "eval" else missing_clients(config.monitor)
    if isinstance(config, RunConfig) and (missing := missing_server(config.rollout)) is not None:
        yield missing


def _notices_of_the_loss(case: Case) -> Iterator[str]:
    """About weights that the paper of the loss does not have, and bounds of a ratio that is always 1."""
    loss, aggregation = case.rl.algo.loss, case.rl.algo.aggregation
    if loss.kind in ("gspo", "sapo") and aggregation != "seq_mean_token_mean":
        yield (
            f"algo.loss.kind is {loss.kind}, and algo.aggregation is {aggregation}: the paper of {loss.kind.upper()} "
            "weights all answers equally, as seq_mean_token_mean does."
        )
    if case.rl.train.updates_per_step > 1 or not isinstance(loss, LossConfig):
        return
    bounds = [f"algo.loss.{name}" for name, value in loss.args.items() if value != LOSS_ARGS[loss.kind][name]]
    unused = [f"algo.loss.kind = {loss.kind}"] * (loss.kind != "ppo_clip") + [_shown(case, key) for key in bounds]
    if unused:
        yield (
            f"{', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no effect: train.updates_per_step is 1, so "
            "the ratio to the policy at the start of the step is exactly 1, where all built-in losses have the same "
            "gradient, also for samples of older weights, whose importance weights algo.correction bounds "
            "(docs/correction.md)."
        )


def _notices_of_the_reward(config: RunConfig) -> Iterator[str]:
    """About a term that the length of answers never reaches."""
    longest = config.rollout.sampling.max_new_tokens
    for name, term in config.reward.terms.items() if config.agent.kind == "single_turn" else ():
        most, buffer = term.args.get("max_tokens"), term.args.get("buffer_tokens")
        if term.kind == "overlong" and isinstance(most, int) and isinstance(buffer, int) and longest <= most - buffer:
            yield (
                f"reward.terms.{name} is always 0: it lowers the reward of answers of more than max_tokens - "
                f"buffer_tokens = {most - buffer} tokens, and rollout.sampling.max_new_tokens is {longest}."
            )


def _not_in_evaluation(case: Case) -> Iterator[str]:
    """Notices of overrides without effect. A file may have the same keys for a training."""
    overridden = [key for key, value in case.given.items() if value.origin == COMMAND_LINE]
    read = ("loop.eval_samples", "loop.eval_term", "loop.eval_pass_score")
    keys = [key for key in overridden if key.startswith(("train.", "algo.", "loop.", "monitor.")) and key not in read]
    if keys:
        values = ", ".join(f"{key} = {show(case.given[key].value)}" for key in keys)
        yield (
            f"{values} on the command line {'have' if len(keys) > 1 else 'has'} no effect: an evaluation only samples "
            "and grades."
        )


def _shown(case: Case, key: str) -> str:
    value = case.given[key]
    return f"{key} = {show(value.value)} [{value.origin}]"


def _ranks_in_turn(config: RunConfig) -> str | None:
    """The notice that train ranks and separate sampler ranks take turns; None if the same ranks do both."""
    train, samplers, rollout = config.cluster.num_train_ranks, config.cluster.num_rollout_ranks, config.rollout
    if not samplers or config.loop.kind != "colocated":
        return None
    if rollout.engine == "endpoint" or rollout.sglang.url is not None:
        return (
            f"{counted(train, 'train rank')} and the server at rollout.{rollout.engine}.url run in turn: each waits "
            "while the other works, because loop.kind=colocated samples with the newest weights only."
        )
    total, both = train + samplers, f"{counted(train, 'train rank')} and {counted(samplers, 'sampler rank')}"
    turns = f"{both} run in turn: each waits while the other works"
    change = f"set cluster.num_train_ranks={total} and cluster.num_rollout_ranks=0 to use all {total} for both"
    overlap = "loop.kind=one_step_off or fully_async lets them work at the same time (docs/schedules.md)"
    if rollout.engine == "embedded":
        return f"{turns}; {overlap}, or {change}."
    return (
        f"{turns}; {overlap}. Separate ranks are needed where the training state and the {rollout.engine} server do "
        "not fit on one device together. Where they do (rollout.release_memory=true frees the server's memory while "
        f"the trainer works), {change}."
    )
