"""From a folder to a Transformers model that computes our attention. The only place that calls from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import ConfigError
from meshrl.model import attention
from meshrl.model.causal import CausalModel

_SAME_NATS = 2e-3  # fp32 rounding of deep models stays below; a leak or an unknown head is a hundred times more
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Transformers causal LM on the CPU with attention "meshrl", parameters in `dtype`, buffers untouched.

    Before it is cast, two short rows are scored packed by our forward and one by one by Transformers' own; a model
    whose rows leak, whose head we do not know, or that is built in a way we can't drive is refused here.

    Raises: ConfigError when the folder holds no model that Transformers can load, or one that we compute differently.
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
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)
        _require_plain_attention(model.config.get_text_config(), path)
        model.config.use_cache = False
        _silence_dropout(model)
        difference = _distance_from_transformers(model)
    except (KeyError, AttributeError, TypeError, ValueError) as cause:
        raise ConfigError(
            f"model.path {str(path)!r} can't be driven by meshrl: {type(cause).__name__}: {cause}"
        ) from cause
    if not difference <= _SAME_NATS:
        raise ConfigError(
            f"{type(model).__name__} of {str(path)!r} scores tokens {difference:.2g} nats away from Transformers' own "
            f"forward when packed (allowed: {_SAME_NATS:g}): its rows see each other, or its head does something that "
            "meshrl does not know. Choose another model"
        )
    return cast_parameters(model, dtype)


def _silence_dropout(model: torch.nn.Module) -> None:
    """Scores must be repeatable: old and new logprobs see the same network, and so do sampler and trainer."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
                setattr(module, name, 0.0)


@torch.no_grad()
def _distance_from_transformers(lm: torch.nn.Module) -> float:
    """Largest difference of a token's logprobs, in nats, between our packed forward and Transformers' own."""
    model, config = CausalModel(lm.eval()), lm.config
    rows = [torch.arange(n) * 7 % (model.vocab_size - 1) + 1 for n in (13, 6)]
    tokens, places = torch.cat(rows), torch.cat([torch.arange(len(r)) for r in rows])
    packed = attention.PackedAttention([0, len(rows[0]), len(tokens)], tokens.device)
    ours = torch.log_softmax(model.head().logits(model.hidden(tokens, places, packed)), dim=-1)
    config._attn_implementation = "eager"  # spelled out in every model's own file
    theirs = torch.cat([torch.log_softmax(lm(row[None]).logits[0].float(), dim=-1) for row in rows])
    config._attn_implementation = attention.NAME
    return float((ours - theirs).abs().max())


def _require_plain_attention(config: Any, path: str | Path) -> None:
    """Convolutions and linear attention carry a state that neither packed rows nor our KV cache keep apart.

    Raises: ConfigError naming the kinds of layers.
    """
    rope = str(getattr(config, "rope_parameters", None) or "")
    for kind in ("dynamic", "longrope"):
        if f"'rope_type': '{kind}'" in rope:
            raise ConfigError(
                f"model.path {str(path)!r} has rope_type {kind}: its positions depend on the longest row of a pack, so "
                "a row's score would depend on its neighbours. Choose a model with another rope_type"
            )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if odd:
        raise ConfigError(
            f"model.path {str(path)!r} is a {config.model_type} with layers of kind {', '.join(odd)}; this version "
            "computes softmax attention only (full_attention, sliding_attention). Choose a model without them"
        )


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
