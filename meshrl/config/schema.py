"""Every dotted key of a configuration, read from the slices: for errors, `meshrl config` and docs/config.md."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from meshrl.config.base import Slice
from meshrl.config.values import show

LONGEST_MISSPELT = 200  # characters; a longer key is no misspelt key, and comparing it with all keys would take minutes
NAME = "NAME"  # the part of a dotted key that the user chooses, as in reward.terms.NAME.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key. allowed: its type and limits in words. default: as YAML, None = required.

    Example: Key(path="train.optimizer.lr", allowed="number > 0", default="1e-06", text="peak learning rate; ...",
    is_section=False).
    """

    path: str
    allowed: str
    default: str | None
    text: str
    is_section: bool

    @property
    def is_dict(self) -> bool:
        """Whether the user chooses the names in it."""
        return self.allowed.startswith("names")


def all_keys(model: type[Slice], prefix: str = "") -> dict[str, Key]:
    """Every key of a slice by its dotted path, sections before their keys, in the order of the slices."""
    keys: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        section, entries = _slice_of(info.annotation), _entries_of(info.annotation)
        keys[path] = Key(
            path=path,
            allowed="a section" if section else _allowed(info),
            default=None if info.is_required() else show(_as_json(info.get_default(call_default_factory=True))),
            text=" ".join((info.description or "").split()),
            is_section=bool(section or entries),
        )
        if section:
            keys |= all_keys(section, f"{path}.")
        if entries:
            path = f"{path}.{NAME}"
            text = f"one entry of {prefix}{name}"
            keys[path] = Key(path=path, allowed="a section", default=None, text=text, is_section=True)
            keys |= all_keys(entries, f"{path}.")
    return keys


def locate(keys: dict[str, Key], path: str) -> tuple[Key | None, str]:
    """The deepest known key that leads to a dotted path, and the rest of the path below it ("" = the key itself).

    Example: "reward.terms.answer.kid" -> (the key reward.terms.NAME, "kid").
    """
    parts, known = path.split("."), ""
    for i, part in enumerate(parts):
        tries = [f"{known}.{name}".lstrip(".") for name in (part, NAME)]
        found = next((candidate for candidate in tries if candidate in keys), None)
        if found is None:
            return keys.get(known), ".".join(parts[i:])
        known = found
    return keys[known], ""


def nearest(keys: dict[str, Key], path: str, is_section: bool = False, least: float = 0.65) -> list[str]:
    """At most three keys that a user may have meant: first the key that has this name in another framework, then keys
    with a similar last part and section. is_section: the unknown key is a section. least: the lowest similarity, 0 to
    1, of the last parts."""
    if len(path) > LONGEST_MISSPELT:
        return []
    section, _, leaf = path.rpartition(".")
    meant = ELSEWHERE.get(leaf.lower())
    scores = {}
    for known, key in keys.items():
        known_section, _, known_leaf = known.rpartition(".")
        likeness = _likeness(leaf.lower(), known_leaf)
        if key.is_section == is_section and likeness >= least:
            scores[known] = likeness + 0.3 * _likeness(section, known_section)
    best = max(scores.values(), default=0.0)
    found = [known for known in sorted(scores, key=lambda k: -scores[k]) if scores[known] > best - 0.3]
    if meant in keys:
        found = [meant, *(known for known in found if scores[known] >= 1.0)]
    return [_in_the_users_names(known, path) for known in dict.fromkeys(found)][:3]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _in_the_users_names(known: str, path: str) -> str:
    parts, given = known.split("."), path.split(".")
    return ".".join(given[i] if part == NAME and i < len(given) else part for i, part in enumerate(parts))


def _allowed(info: FieldInfo) -> str:
    limits = [
        f"{symbol} {show(getattr(rule, name))}"
        for rule in info.metadata
        for name, symbol in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, name, None) is not None
    ]
    allowed = words(info.annotation)
    base, null, _ = allowed.partition(" or null")
    return f"{base} {' and '.join(limits)}{null}" if limits else allowed


_WORDS: dict[Any, str] = {str: "string", bool: "true | false", int: "integer", float: "number", Any: "anything"}


def words(annotation: Any) -> str:
    """The values that a field of this type takes. Raises: KeyError for a type that no field of a config has."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(show(value) for value in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else words(arg) for arg in args)
    if origin is list:
        plural = "" if typing.get_origin(args[0]) is Literal else "s"
        return f"list of {words(args[0])}{plural}"
    if origin is tuple:
        return f"[{', '.join(words(arg) for arg in args)}]"
    if origin is dict:
        return "names -> sections" if _entries_of(annotation) else "names -> values"
    return _WORDS[annotation]


def _slice_of(annotation: Any) -> type[Slice] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Slice) else None


def _entries_of(annotation: Any) -> type[Slice] | None:
    args: Sequence[Any] = typing.get_args(annotation)
    return _slice_of(args[1]) if typing.get_origin(annotation) is dict else None


def _as_json(value: Any) -> Any:
    return TypeAdapter(Any).dump_python(value, mode="json", exclude_defaults=True)


NAMES_ELSEWHERE = {  # key -> its names in other frameworks
    "train.optimizer.lr": "learning_rate",
    "train.optimizer.clip": "max_grad_norm grad_clip clip_grad",
    "train.scheduler.warmup_steps": "warmup_ratio",
    "train.scheduler.kind": "lr_scheduler_type",
    "train.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "train.max_tokens_per_microbatch": "ppo_micro_batch_size_per_gpu per_device_train_batch_size micro_batch_size "
    "gradient_accumulation_steps ppo_max_token_len_per_gpu",
    "train.updates_per_step": "ppo_mini_batch_size steps_per_generation",
    "loop.prompts_per_step": "train_batch_size rollout_batch_size batch_size",
    "loop.samples_per_prompt": "n num_generations n_samples_per_prompt group_size",
    "loop.num_steps": "max_steps total_training_steps",
    "loop.eval_every_steps": "test_freq eval_steps",
    "loop.save_every_steps": "save_freq save_steps",
    "rollout.sampling.max_new_tokens": "max_response_length max_completion_length max_tokens",
    "data.max_prompt_tokens": "max_prompt_length",
    "rollout.max_context_tokens": "max_model_len",
    "rollout.max_running_requests": "max_num_seqs",
    "data.path": "train_files",
    "data.eval_path": "val_files",
    "data.prompt": "prompt_key",
    "model.path": "model_name_or_path",
    "model.dtype": "torch_dtype",
    "algo.kl.coef": "beta kl_coef kl_loss_coef",
    "algo.kl.estimator": "kl_loss_type",
    "algo.advantage": "adv_estimator advantage_estimator",
    "algo.aggregation": "loss_agg_mode loss_type",
    "algo.loss.clip_low": "clip_ratio clip_ratio_low epsilon",
    "algo.loss.clip_high": "clip_ratio_high epsilon_high",
    "algo.entropy_coef": "entropy_coeff",
    "cluster.num_train_ranks": "n_gpus_per_node nproc_per_node world_size",
    "cluster.nodes": "nnodes",
    "run.name": "experiment_name run_name",
    "run.folder": "output_dir default_local_dir",
    "run.resume": "resume_mode resume_from_checkpoint",
    "run.keep_checkpoints": "max_actor_ckpt_to_keep save_total_limit",
    "rollout.release_memory": "free_cache_engine enable_sleep_mode vllm_enable_sleep_mode",
    "algo.correction.high": "vllm_importance_sampling_cap tis_imp_ratio_cap",
    "algo.loss.dual_clip": "clip_ratio_c",
    "algo.kl.place": "use_kl_loss use_kl_in_reward",
    "algo.truncated": "mask_truncated_completions",
    "loop.in_flight": "partial_rollout",
    "reward.terms": "reward_funcs custom_reward_function reward_manager",
    "data.system": "system_prompt",
    "model.lora.rank": "lora_rank lora_r",
    "monitor.sinks": "logger report_to",
    "monitor.wandb_project": "project_name",
}
ELSEWHERE = {name: key for key, names in NAMES_ELSEWHERE.items() for name in names.split()}
