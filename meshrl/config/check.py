"""Checks that take more than one key, the files, or what this version can do. All of them run before torch exists.

Each check yields Problems: which keys, what is wrong, what to do. None raises, so that a user sees all at once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshrl.config.algo import ADVANTAGE_NAMES, LossConfig
from meshrl.config.arithmetic import data_ranks, longest_row_tokens, ranks_in_turn
from meshrl.config.check_algo import LOSS_KIND, algorithm_problems, unused_algo_keys
from meshrl.config.check_data import data_problems, unused_data_keys
from meshrl.config.check_rollout import engine_problems, unused_engine_keys
from meshrl.config.places import HUB_ID, find
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import Problem, Value
from meshrl.config.values import show
from meshrl.core.files import Unreadable, is_there, read_json
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, similar_names

Purpose = Literal["train", "eval", "sft"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is checked. given: the values of files and command line by dotted key; all other keys have defaults.

    known: names of the reward and agent tables, {"reward": {...}, "agent": {...}}; without an entry only the form of
    a kind is checked. Its entry "needs_answer" holds the reward kinds that need the answer of a row. rows: those given
    in memory, by the key of their path.
    """

    config: RunConfig | SftRunConfig
    given: dict[str, Value]
    folder: Path
    purpose: Purpose
    known: dict[str, set[str]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)


Check = Callable[[Case], Iterable[Problem]]


def check(case: Case) -> list[Problem]:
    """Everything that is wrong with a config whose keys and types are right."""
    checks = [_not_in_this_version, _aliases, _unused, _mesh, _optimization, _model_folder, _sinks, _resume, _machines]
    config = case.config
    problems: list[Problem] = []
    if isinstance(config, RunConfig):
        problems = [*data_problems(case, config), *_loop(case, config), *_sampling(case, config), *_kinds(case, config)]
        problems += [*_cluster(config), *engine_problems(case.given, config, case.purpose)]
        problems += algorithm_problems(config.algo, training=case.purpose == "train")
    return [*(problem for each in checks for problem in each(case)), *problems]


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


_DEADLINES = "cluster.deadlines."
OF_RANKS = ("cluster.max_restarts", *(_DEADLINES + p for p in ("start", "load", "annotate", "optim", "report", "end")))
"""What only ranks in processes of their own can be held to: to die, or to be waited for. The other deadlines also end
a call that holds up the controller."""
NOT_IN_SFT = tuple(_DEADLINES + p for p in ("rollout", "reward", "annotate", "sync", "eval", "report"))


def unused(config: RunConfig | SftRunConfig) -> dict[str, str]:
    """Keys that the other choices leave without effect -> why. Setting one is an error; --explain shows them so."""
    found: dict[str, str] = {}
    if config.cluster.executor != "ray":
        found["cluster.address"] = f"cluster.executor is {config.cluster.executor}"
    if config.cluster.executor == "inline":
        found |= dict.fromkeys(OF_RANKS, "cluster.executor is inline: the one rank is this very process")
    if not config.model.lora.enabled:
        found |= dict.fromkeys((f"model.lora.{name}" for name in ("rank", "alpha", "targets")), "model.lora is off")
    if config.train.scheduler.kind == "constant":
        found["train.scheduler.min_lr_ratio"] = "train.scheduler.kind is constant"
    if "wandb" not in config.monitor.sinks:
        found["monitor.wandb_project"] = "monitor.sinks has no wandb"
    if isinstance(config, SftRunConfig):
        found["train.updates_per_step"] = "an SFT step is one optimizer step"
        found["cluster.num_rollout_ranks"] = "SFT samples nothing"
        found |= dict.fromkeys(NOT_IN_SFT, "SFT has no such phase")
        return found
    if config.data.eval_path is None:
        for key in ("loop.eval_samples", "loop.save_best"):
            found[key] = "data.eval_path is null"
    if config.cluster.num_rollout_ranks:
        found["rollout.release_memory"] = "cluster.num_rollout_ranks is above 0: samplers have devices of their own"
    else:
        found["rollout.sync_transport"] = found["rollout.sync_folder"] = "cluster.num_rollout_ranks is 0"
    return unused_algo_keys(config.algo) | unused_data_keys(config.data) | unused_engine_keys(config.rollout) | found


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {  # key -> (what this version can do, why nothing else)
    "model.dtype": (("bfloat16", "float32"), "float16 gradients need loss scaling, which this version does not have"),
    "model.vision": (("shard",), "this version trains text models only, so nothing reads the choice for vision towers"),
    "train.mesh.ulysses": ((1,), "this version does not split rows over ranks yet; lower data.max_prompt_tokens"),
    "train.mesh.tp": ((1,), "this version has no tensor parallelism in training yet; shard with train.mesh.dp_shard"),
    "train.tensor_model_parallel_size": ((None, 1), "this version has no tensor parallelism in training yet"),
    "rollout.pipeline_model_parallel_size": ((1,), "no rollout engine here splits a model into pipeline stages"),
    "loop.kind": (("colocated",), "this version has no asynchronous loop yet: it generates and trains in turn"),
    "loop.max_staleness": ((0,), "the colocated loop always samples with the newest weights"),
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
            yield Problem((alias, key), "two names of one number, and they disagree: give one of them.")


def _unused(case: Case) -> Iterator[Problem]:
    for key, why in unused(case.config).items():
        if key in case.given and case.given[key].value is not None:
            yield Problem((key,), f"would have no effect: {why}. Remove it, or change that.")


def _mesh(case: Case) -> Iterator[Problem]:
    train, ranks = case.config.train, case.config.cluster.num_train_ranks
    strategy, mesh = train.sharding_strategy, train.mesh
    keys = ("train.sharding_strategy", "train.mesh.dp_replicate", "train.mesh.dp_shard", "cluster.num_train_ranks")
    if mesh.dp_shard != -1 and mesh.dp_shard < 1:
        yield Problem(keys[2:3], "must be a number of ranks >= 1, or -1 for all that remain.")
        return
    replicate, shard = data_ranks(train, ranks)
    if strategy == "HYBRID_SHARD" and replicate == 1:
        yield Problem(
            keys[:2], "HYBRID_SHARD copies a sharded model; with one copy use FULL_SHARD, else dp_replicate >= 2."
        )
    elif strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        yield Problem(keys[:2], f"{strategy} shards over all ranks; for {replicate} sharded copies use HYBRID_SHARD.")
    elif strategy == "NO_SHARD" and shard != 1:
        yield Problem((keys[0], keys[2]), "NO_SHARD keeps a whole model in each rank: dp_shard must be 1 or -1.")
    elif replicate * shard != ranks:
        yield Problem(
            keys[1:],
            f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard} ranks, but num_train_ranks is {ranks}. "
            "Leave dp_shard at -1, or make the product equal.",
        )


def _optimization(case: Case) -> Iterator[Problem]:
    train, config = case.config.train, case.config
    if not all(0 <= beta < 1 for beta in train.optimizer.betas):
        yield Problem(("train.optimizer.betas",), "both must be at least 0 and below 1.")
    steps = config.sft.num_steps if isinstance(config, SftRunConfig) else config.loop.num_steps * train.updates_per_step
    if train.scheduler.warmup_steps >= steps:
        count = "sft.num_steps" if isinstance(config, SftRunConfig) else "loop.num_steps"
        yield Problem(
            ("train.scheduler.warmup_steps", count),
            f"the run has {steps} optimizer steps, so the learning rate would never reach its peak. Warm up for fewer.",
        )
    name = config.run.name
    if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        yield Problem(("run.name",), "must be the name of one folder below run.folder, without slashes.")


def _loop(case: Case, config: RunConfig) -> Iterator[Problem]:
    loop = config.loop
    if loop.samples_per_prompt == 1 and config.algo.advantage in ADVANTAGE_NAMES:
        yield Problem(
            ("loop.samples_per_prompt", "algo.advantage"),
            f"{config.algo.advantage} compares the answers of a group; a group of one has nothing to compare with. "
            "Use 2 or more (8 is usual).",
        )
    if loop.prompts_per_step % config.train.updates_per_step:
        yield Problem(
            ("train.updates_per_step", "loop.prompts_per_step"),
            "must divide prompts_per_step, so that each optimizer step gets the same number of whole groups.",
        )
    if config.data.eval_path is None and (loop.eval_every_steps or case.purpose == "eval"):
        keys = ("data.eval_path", "loop.eval_every_steps") if loop.eval_every_steps else ("data.eval_path",)
        yield Problem(keys, "an evaluation needs held-out rows: give data.eval_path a JSONL file.")


def _sampling(case: Case, config: RunConfig) -> Iterator[Problem]:
    sampling, rollout = config.rollout.sampling, config.rollout
    if case.purpose == "train":
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(sampling, name) != off:
                yield Problem(
                    (f"rollout.sampling.{name}",),
                    "a filter samples from another distribution than the trainer scores, which biases every ratio. "
                    f"In training leave it at {show(off)} (off).",
                )
    if sampling.temperature == 0 and (case.purpose == "train" or config.loop.eval_samples > 1):
        text = "temperature 0 gives every sample of a prompt the same answer. Use a temperature above 0 (1.0 is usual)."
        yield Problem(("rollout.sampling.temperature",), text)
    if any(token < 0 for token in sampling.stop_token_ids):
        yield Problem(("rollout.sampling.stop_token_ids",), "token ids are 0 or more.")
    if any(not text for text in sampling.stop):
        yield Problem(("rollout.sampling.stop",), "an empty text would end every turn at its first token. Remove it.")
    need, room = config.data.max_prompt_tokens + sampling.max_new_tokens, rollout.max_context_tokens
    if room is not None and need > room:
        yield Problem(
            ("rollout.max_context_tokens", "data.max_prompt_tokens", "rollout.sampling.max_new_tokens"),
            f"the longest prompt and answer need {need} tokens, but the context has {room}: answers would be cut. "
            "Lower max_prompt_tokens or max_new_tokens, or raise max_context_tokens.",
        )


def _cluster(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.executor == "inline":
        for name, needed in (("num_train_ranks", 1), ("num_rollout_ranks", 0)):
            if getattr(cluster, name) != needed:
                text = (
                    f"inline runs everything in this one process: {name} must be {needed}. Or use executor: processes."
                )
                yield Problem((f"cluster.{name}", "cluster.executor"), text)
    name = "num_rollout_ranks" if cluster.num_rollout_ranks else "num_train_ranks"
    replicas = max(1, getattr(cluster, name) // config.rollout.tp_size)
    if config.rollout.mesh.dp not in (-1, replicas):
        number = f"{replicas} replica{'s' if replicas > 1 else ''}"
        text = f"the ranks make {number} of the sampler: use {replicas}, or -1 for as many as there are."
        yield Problem(("rollout.mesh.dp", f"cluster.{name}"), text)


def _machines(case: Case) -> Iterator[Problem]:
    cluster = case.config.cluster
    ranks = cluster.num_train_ranks + cluster.num_rollout_ranks
    if cluster.executor != "ray":
        if cluster.nodes > 1:
            text = "several machines need executor: ray; or start the run by torchrun, and leave nodes out."
            yield Problem(("cluster.nodes", "cluster.executor"), text)
        return
    if importlib.util.find_spec("ray") is None:
        yield Problem(("cluster.executor",), "ray is not installed: pip install 'meshrl[ray]', on every machine.")
    if cluster.address == "local" and cluster.nodes > 1:
        yield Problem(
            ("cluster.address", "cluster.nodes"), "a local Ray has one machine. Give the cluster's host:port."
        )
    if ranks % cluster.nodes:
        keys = ("cluster.nodes", "cluster.num_train_ranks", "cluster.num_rollout_ranks")
        yield Problem(keys, f"every machine has equally many ranks, but {cluster.nodes} do not divide {ranks}.")


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


def _sinks(case: Case) -> Iterator[Problem]:
    for name in case.config.monitor.sinks if case.purpose != "eval" else ():  # an evaluation only prints
        if importlib.util.find_spec(name) is None:
            yield Problem(("monitor.sinks",), f"{name} is not installed: pip install {name}, or leave it out here.")


def _resume(case: Case) -> Iterator[Problem]:
    run = case.config.run
    if case.purpose == "eval" or run.resume == "never":
        return
    if run.resume == "auto":
        if run.name == "auto":
            text = "a name made of the time names no run that was there before. Give the run a name of its own."
            yield Problem(("run.resume", "run.name"), text)
        return
    path, places = find(case.given["run.resume"], case.folder)
    if path is None:
        looked = " and ".join(str(place) for place in places)
        yield Problem(("run.resume",), f"allowed: never, auto, or a checkpoint's folder; looked for {looked}.")
    elif not ((path / "manifest.json").is_file() or (path / "state" / "manifest.json").is_file()):
        text = f"{path} is no checkpoint: it has no state/manifest.json. Give a folder such as checkpoints/step_000100."
        yield Problem(("run.resume",), text)


def _model_folder(case: Case) -> Iterator[Problem]:
    key, text = "model.path", case.config.model.path
    path, places = find(case.given[key], case.folder)
    if path is None:
        starts_in_a_folder = any(is_there(place.parent) for place in places if "/" in text)
        if not HUB_ID.fullmatch(text) or starts_in_a_folder:
            looked = " and ".join(str(place) for place in places)
            yield Problem((key,), f"no such folder; looked for {looked}. A hub id is written organisation/name.")
        return
    if not (path / "config.json").is_file():
        model = _newest_model(path)
        if model is not None:
            what = f"{path} has no config.json, but has models of a run below it. Set the newest of them"
            yield Problem((key,), f"{what}: {key}={Path(text) / model}")
        else:
            yield Problem((key,), f"{path} has no config.json: give a folder made by save_pretrained.")
        return
    if not any(path.glob("*.safetensors")):
        pickled = any(any(path.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        what = " but a pickle, which can run code when it is read" if pickled else ""
        yield Problem((key,), f"{path} has no weights (*.safetensors){what}. Write them by save_pretrained.")
    if not any(any(path.glob(pattern)) for pattern in ("tokenizer*", "vocab*")):
        yield Problem((key,), f"{path} has no tokenizer (tokenizer.json).")
    yield from _model_config(case, path / "config.json")


def _newest_model(folder: Path) -> Path | None:
    """The newest model that a run saved, below the run's folder, its checkpoints or one checkpoint."""
    for pattern in ("checkpoints/step_*/model", "step_*/model", "model"):
        models = [path for path in folder.glob(pattern) if (path / "config.json").is_file()]
        if models:
            return max(models, key=lambda path: (len(path.parent.name), path)).relative_to(folder)
    return None


def _model_config(case: Case, path: Path) -> Iterator[Problem]:
    try:
        facts = read_json(path)
    except Unreadable as e:
        yield Problem(("model.path",), f"{path}: {e}. Give a folder made by save_pretrained.")
        return
    if "vision_config" in facts:
        yield Problem(("model.path",), "a model with a vision tower; this version trains text models only.")
        return
    facts = facts.get("text_config", facts)
    if not isinstance(facts, dict):
        yield Problem(("model.path",), f"{path}: text_config should be an object, not {facts!r:.80}.")
        return
    room, need = facts.get("max_position_embeddings"), longest_row_tokens(case.config)
    if not isinstance(room, int) or need is None or need <= room:
        return
    if isinstance(case.config, SftRunConfig):
        keys: tuple[str, ...] = ("sft.max_row_tokens", "model.path")
    else:
        keys = ("data.max_prompt_tokens", "rollout.sampling.max_new_tokens", "model.path")
    yield Problem(keys, f"the longest row has {need} tokens, but the model has positions for {room}. Lower them.")


def notices(config: RunConfig | SftRunConfig, purpose: Purpose) -> list[str]:
    """What is right, but not what some readers of the config may think."""
    found = []
    if isinstance(config, RunConfig) and purpose == "train" and (turns := ranks_in_turn(config)) is not None:
        found.append(turns)
    attention = config.model.attn_implementation
    if attention != "auto":
        found.append(
            f"model.attn_implementation is {attention}: trainer and sampler share one packed attention over torch's "
            "scaled_dot_product_attention, which picks its kernel (flash where the hardware has it) by itself."
        )
    if config.train.master_dtype == "bfloat16":
        found.append(
            f"train.master_dtype is bfloat16: steps of lr {config.train.optimizer.lr:g} are lost in rounding wherever "
            "they are below 1/256 of a weight; float32 masters keep them."
        )
    longest, budget = longest_row_tokens(config), config.train.max_tokens_per_microbatch
    if longest is not None and longest > budget:
        found.append(
            f"the longest row may have {longest} tokens, above train.max_tokens_per_microbatch = {budget}: rows are "
            "never split, so such a row makes a micro-batch of its own."
        )
    return found
