"""From a folder to a Transformers model that computes our attention. The only place that calls from_pretrained."""

from __future__ import annotations

from pathlib import Path

import torch

from meshrl.core.errors import ConfigError
from meshrl.model import attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Transformers causal LM on the CPU with attention "meshrl", parameters in `dtype`, buffers untouched.

    Raises: ConfigError when the folder holds no model that Transformers can load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # as many bars as ranks would tear the run's own display
    attention.register()
    folder = Path(path)
    if folder.is_absolute() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path is {str(path)!r}, but it holds no config.json; give a folder made by save_pretrained"
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)
    model.config.use_cache = False
    for module in model.modules():
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0  # RL scores must be repeatable: old and new logprobs see the same network
    return cast_parameters(model, dtype)


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast parameters only: rotary buffers rounded to bf16 are 9.5 rad off at position 8192 (P10). Ties survive."""
    for p in model.parameters():  # yields a tied tensor once
        p.data = p.data.to(dtype)
    return model


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Alias -> the name that holds the tensor, for every parameter that appears under two names."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            tied[name] = first[id(p)]
        else:
            first[id(p)] = name
    return tied
