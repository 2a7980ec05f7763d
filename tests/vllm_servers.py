"""vLLM servers of tiny models. A server takes seconds to start, so tests share servers."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vision_families
from tiny_models import tiny_lm
from vision_families import BEGIN, END, IMAGE, VIDEO

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.model.inputs import TEXT_INPUTS, ModelInputs
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm.dialect import VllmDialect, http_of, start_server

MISSING = "" if importlib.util.find_spec("vllm") else "vLLM is not installed here: make test-vllm"
NO_VISION = MISSING or (
    ""
    if importlib.util.find_spec("torchvision")
    else "no torchvision: pip install --no-deps --target FOLDER torchvision==0.28.0, and set PYTHONPATH=FOLDER"
)
MAX_CONTEXT_TOKENS = 1024
CPU = torch.device("cpu")
MODEL: dict[str, Any] = {  # the smallest with a kernel in vLLM's CPU attention; both ranks of tp 2 hold its one KV head
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": MAX_CONTEXT_TOKENS,
}


def tiny_vllm_lm(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    return tiny_lm("qwen2", dtype=dtype, seed=seed, **{**MODEL, **changes})


PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
NAMES = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>"}


def vllm_vision_family(family: str) -> str:
    """The name of an entry that is added to vision_families: the family with the smallest sizes that vLLM takes."""
    entry, name = vision_families.FAMILIES[family], f"{family} for vLLM"
    config = copy.deepcopy(entry.config)
    config["text_config"] |= {**MODEL, "head_dim": 32, "tie_word_embeddings": False}
    # Transformers' class of qwen3_vl interleaves in any case; vLLM's if the config asks for it, as published ones do.
    config["text_config"]["rope_parameters"] |= {"mrope_section": [8, 4, 4], "mrope_interleaved": family == "qwen3_vl"}
    config["vision_config"] |= {"hidden_size": 64, "embed_dim" if family == "qwen2_vl" else "out_hidden_size": 64}
    vision_families.FAMILIES[name] = vision_families.VisionFamily(
        config, entry.process, entry.sizes, types=entry.types, model_type=family
    )
    return name


def save_processor(family: str, folder: Path) -> None:
    """Write the tokenizer and the processor's settings of such a model, which vLLM's classes with a tower read."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({NAMES.get(i, f"<{i}>"): i for i in range(64)}, unk_token="<0>"))
    core.add_special_tokens(list(NAMES.values()))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<2>", pad_token="<0>").save_pretrained(folder)
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": PROCESSORS[family]}))


def config_of(**changes: Any) -> RolloutConfig:
    return RolloutConfig(engine="vllm", max_running_requests=4, vllm=VllmConfig(kv_cache_bytes=32 << 20), **changes)


@contextmanager
def serving(
    lm: torch.nn.Module, folder: Path, *args: str, device: torch.device = CPU, **changes: Any
) -> Iterator[ServerProcess]:
    """A server of a model. args: options of vLLM that follow meshrl's own, so they may override these."""
    lm.save_pretrained(folder)
    cfg = config_of(**changes)
    cfg = cfg.model_copy(
        update={"vllm": cfg.vllm.model_copy(update={"args": ["--enforce-eager", *args]})}
    )  # compiling takes longer than the tests
    model = ModelConfig(path=str(folder), dtype=str(lm.dtype).removeprefix("torch."))
    server = start_server(
        ServerSpec(model=model, rollout=cfg, device=device, name="vllm", max_context_tokens=MAX_CONTEXT_TOKENS)
    )
    try:
        yield server
    finally:
        server.close()


def client_of(
    server: ServerProcess,
    dialect: type[VllmDialect] = VllmDialect,
    inputs: ModelInputs = TEXT_INPUTS,
    **changes: Any,
) -> ServerEngine:
    """An engine that uses a shared server, for one event loop; closing it does not end the server. inputs: of the
    server's model."""
    facts: dict[str, Any] = {
        "stop_token_ids": (2,),
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "vocab_size": 64,
    }
    return ServerEngine(dialect(http_of(server), None, can_release=True, inputs=inputs), **{**facts, **changes})
