"""The keys of model.* and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from meshrl.config.base import OnlyWith, Slice
from meshrl.config.case import Case, Problem
from meshrl.config.source import HUB_ID
from meshrl.core.files import Unreadable, is_there, read_json

_ON = OnlyWith("model.lora.enabled", True, "model.lora is off")
EXPERTS = "experts"  # in model.lora.targets: the joint tensors of a mixture's experts
VISION = "vision"  # in model.lora.targets: the linear layers of the vision tower and its projector


class LoraConfig(Slice):
    enabled: bool = False
    """train low-rank adapters instead of all weights"""
    rank: Annotated[int, _ON] = Field(16, ge=1)
    """rank of an adapter B A, the number of rows of A and of columns of B; a higher rank can learn more"""
    alpha: Annotated[float, _ON] = Field(32.0, gt=0)
    """an adapter's output is multiplied by alpha / rank; twice the rank is usual"""
    targets: Annotated[list[str], _ON] = Field(["all-linear"])
    """linear layers that get an adapter, by the last part of their names, such as q_proj; all-linear instead of such
    names = all linear layers of the language model except the head; vision, besides these or alone = all of the vision
    tower and its projector; experts, likewise = the experts of a mixture, which are joint tensors (peft's
    target_parameters). With experts, samplers get merged weights, train.mesh.tp is 1, and
    train.activation_checkpointing should not be false, else the merged experts of all layers stay until the backward
    pass.
    Trainer and sampler compute with the sum of weight and adapter in model.dtype: in bfloat16 a change far below 1/256
    of a weight has no effect before it has grown"""

    @property
    def on_experts(self) -> bool:
        return self.enabled and EXPERTS in self.targets

    @property
    def scale(self) -> float:
        """The factor of B A in the layer's output."""
        return self.alpha / self.rank


class ModelConfig(Slice):
    path: str
    """folder with config.json, safetensors and tokenizer, or a Hugging Face Hub id organisation/name; the folder of a
    run = its best model, else its newest"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """dtype in which trainer and sampler compute; the trainer stores parameters in train.master_dtype. On a CPU without
    fast products of 16-bit numbers (x86 without AVX-512 or AMX) the default is float32, which is many times faster"""
    attn_implementation: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """how trainer and embedded sampler compute attention: flash (or flash_attention_2) = a kernel for packed rows;
    sdpa = torch's SDPA over padded rows; eager = plain matrix products, for a debugger;
    auto = flash where the device and the model permit it (on H100 and B200 cuDNN, if all rows of a micro-batch have
    4,096 tokens or more and share no prompt), else sdpa, and matrix products for short rows on a CPU. The run reports
    what it uses, and why where it can't be the one that is set: then it is as auto. Embedded samplers compute prompts
    in this way, and new tokens by matrix products over their KV cache, on NVIDIA GPUs by kernels of meshrl; servers
    have their own"""
    router_dtype: Literal["auto", "float32"] = "auto"
    """dtype in which the routers of a mixture of experts compute, in trainer and embedded sampler (Megatron's
    moe_router_dtype): float32 = their parameters, of model.dtype, their logits and scores are widened to fp32; auto =
    as the model's class in Transformers does. Servers have their own"""
    lora: LoraConfig = LoraConfig()
    """low-rank adapters"""
    vision: Literal["train", "freeze"] = "train"
    """of a model with a vision tower: train (or shard) = the tower and its projector are sharded and trained like the
    language model; freeze = they are sharded, and have neither gradients nor optimizer state. LoRA adapts them only
    with vision in model.lora.targets"""

    @field_validator("attn_implementation", mode="before")
    @classmethod
    def _other_name(cls, value: object) -> object:
        return "flash" if value == "flash_attention_2" else value

    @field_validator("vision", mode="before")
    @classmethod
    def _shard_is_train(cls, value: object) -> object:
        return "train" if value == "shard" else value


def model_problems(case: Case) -> Iterator[Problem]:
    model = case.config.model
    if model.vision == "freeze" and model.lora.enabled and VISION in model.lora.targets:
        text = f"adapters in a tower that is not trained. Leave {VISION} out, or set model.vision: train."
        yield Problem(("model.lora.targets", "model.vision"), text)
    key, text = "model.path", model.path
    path, places = case.find(key)
    is_gguf = text.lower().endswith(".gguf")
    to_folder = f"A GGUF file is converted first: meshrl convert {text} FOLDER, then {key}=FOLDER."
    if path is None:
        starts_in_a_folder = any(is_there(place.parent) for place in places if "/" in text)
        if is_gguf or not HUB_ID.fullmatch(text) or starts_in_a_folder:
            looked = " and ".join(str(place) for place in places)
            remedy = to_folder if is_gguf else "A hub id is written organisation/name."
            yield Problem((key,), f"no such folder; looked for {looked}. {remedy}")
        return
    if path.is_file():
        remedy = to_folder if is_gguf else "Give a folder made by save_pretrained."
        yield Problem((key,), f"{path} is a file, not a folder. {remedy}")
        return
    if not (path / "config.json").is_file():
        remedy = "give a folder made by save_pretrained, or the folder of a run that has saved a model"
        yield Problem((key,), f"{path} has no config.json: {remedy}.")
        return
    if case.starts is not False:
        yield from missing_files(path)
    yield from _model_config(case, path / "config.json")


def missing_files(path: Path) -> Iterator[Problem]:
    """What a model's folder with a config.json lacks for a run; --explain does not need it."""
    if not any(path.glob("*.safetensors")):
        pickled = any(any(path.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        detail = " but a pickle, which can run code when it is read" if pickled else ""
        text = f"{path} has no weights (*.safetensors){detail}. Write them by save_pretrained."
        yield Problem(("model.path",), text)
    if not any(any(path.glob(pattern)) for pattern in ("tokenizer*", "vocab*")):
        yield Problem(("model.path",), f"{path} has no tokenizer (tokenizer.json).")


def _model_config(case: Case, path: Path) -> Iterator[Problem]:
    try:
        values = read_json(path)
    except Unreadable as e:
        yield Problem(("model.path",), f"{path}: {e}. Give a folder made by save_pretrained.")
        return
    if (more := unknown_tower(values)) is not None:
        yield Problem(("model.path",), TOWER_REFUSED.format(more=more, path=path.parent))
        return
    values = values.get("text_config", values)
    if not isinstance(values, dict):
        yield Problem(("model.path",), f"{path}: text_config should be an object, not {values!r:.80}.")
        return
    room, need = num_positions(values), case.config.longest_row_tokens  # as fitting_lengths has changed it
    if room is None or need is None or need <= room:
        return
    keys = (*case.config.ROW_LENGTH_KEYS, "model.path")
    limits = " + ".join(case.config.ROW_LENGTH_KEYS)
    text = f"the longest row has {need} tokens, but the model has positions for {room}: {limits} may be at most {room}."
    if room != _positions(values):
        text += " Its rope_type longrope computes longer rows with other rotations, also of their first tokens."
    yield Problem(keys, text)


IMAGE_MODELS = (  # model types with a vision tower that are trained with it, see model/images.py
    *("aya_vision", "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
TOWER_REFUSED = (
    "a model with a vision tower or the like ({more}), of a family that meshrl does not train with its tower "
    "(docs/models.md). Write its text model first, and give that: meshrl convert {path} FOLDER"
)
_TOWER = re.compile(r"(vision|audio|image|vq)\w*_config")


def more_than_text(values: Mapping[str, Any]) -> str | None:
    """What shows that a model with this config.json has more than a text model; None if nothing does."""
    towers = [key for key in values if _TOWER.fullmatch(key) and values[key] is not None]
    classes = re.findall(r"\w+ForConditionalGeneration", str(values.get("architectures")))
    return ", ".join([*classes, *towers]) or None


def unknown_tower(values: Mapping[str, Any]) -> str | None:
    """As more_than_text, of a model that can't be trained with it."""
    return None if values.get("model_type") in IMAGE_MODELS else more_than_text(values)


def fitting_lengths(case: Case) -> dict[str, int]:
    """The lengths that are not given -> shorter ones with which a row fits into the positions of the model; an answer
    gets at most half of them. Empty if the defaults fit, or nothing fits."""
    path, _ = case.find("model.path")
    try:
        values = read_json(path / "config.json") if path is not None else {}
    except Unreadable:  # a problem of its own
        return {}
    text = values.get("text_config", values)
    room = num_positions(text) if isinstance(text, dict) else None
    lengths: dict[str, Any] = {key: reduce(getattr, key.split("."), case.config) for key in case.config.ROW_LENGTH_KEYS}
    need, free = sum(lengths.values()), [key for key in lengths if key not in case.given]
    if room is None or need <= room or case.config.longest_row_tokens != need:
        return {}
    rest = room - sum(length for key, length in lengths.items() if key not in free)
    if not free or rest < len(free):
        return {}
    answer = min(lengths[free[-1]], rest // len(free))
    fitting = {free[0]: rest - answer} | {free[-1]: answer} if len(free) > 1 else {free[0]: rest}
    return {key: length for key, length in fitting.items() if length != lengths[key]}


def _positions(values: Mapping[str, Any]) -> Any:
    """Of the model, by the name that its family has for them."""
    names = ("max_position_embeddings", "n_positions", "model_max_length")
    return next((values[name] for name in names if name in values), None)


def num_positions(values: Mapping[str, Any]) -> int | None:
    """The most tokens of a row of a model with this config.json; None if it does not say. With rope_type longrope,
    fewer than the model has: rows of a pack, and a row while it is sampled, need the same rotations."""
    room, original = _positions(values), "original_max_position_embeddings"
    if not isinstance(room, int):
        return None
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    parts = [rope, *rope.values()] if isinstance(rope, dict) else []  # others are reported when the model is loaded
    for part in (part for part in parts if isinstance(part, dict)):
        if (part.get("rope_type") or part.get("type")) in ("longrope", "su"):
            room = min(room, part.get(original) or values.get(original) or room)
    return room
