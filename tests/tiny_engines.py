"""Embedded engines over tiny models, driven without an event loop; and the same weights in plain Transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from meshrl.core.types import Request, SamplingParams, Turn
from meshrl.model.causal import CausalModel
from meshrl.model.hub_names import persistent_buffers, tied_names
from meshrl.model.lean import lean_decoder
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.digest import digest
from meshrl.sync.manifest import Ack, Layout, make_layout
from meshrl.sync.receive import describe
from meshrl.sync.send import iter_buckets, make_header, send_weights


def tiny_engine(lm: torch.nn.Module, trusted: bool = True, **changes: Any) -> EmbeddedEngine:
    """An engine over a copy of the model; its weights count as version 0 unless trusted is False."""
    facts: dict[str, Any] = dict(stop_token_ids=(), max_running=8, max_context_tokens=256, engine_id="tiny")
    model = CausalModel(copy.deepcopy(lm).eval().requires_grad_(False))
    engine = EmbeddedEngine(model, device=torch.device("cpu"), lean=lean_decoder(model), **{**facts, **changes})
    if trusted:
        engine.trust_loaded_weights()
    return engine


def ask(name: str, context: Iterable[int], *, temperature: float = 1.0, **changes: Any) -> Request:
    """A request; fields of SamplingParams may stand beside those of Request."""
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    return Request(
        id=name,
        context_ids=np.array(list(context), np.int32),
        sampling=SamplingParams(temperature=temperature, **sampling),
        **{"max_new_tokens": 16, **changes},
    )


def run(engine: EmbeddedEngine, requests: Iterable[Request]) -> dict[str, Turn]:
    """Step until all are done."""
    for request in requests:
        engine.submit(request)
    turns: dict[str, Turn] = {}
    while engine.has_work:
        turns.update(engine.step())
    return turns


def plain(lm: torch.nn.Module) -> torch.nn.Module:
    """The same weights with Transformers' own attention and cache, for `generate`."""
    config = copy.deepcopy(lm.config)
    config.use_cache = True
    twin = type(lm)._from_config(config, attn_implementation="eager").eval()
    twin.load_state_dict(lm.state_dict())
    return twin


def layout_of(lm: torch.nn.Module, bucket_bytes: int = 4096) -> Layout:
    specs = describe(_weights(lm))
    return make_layout([(name, *spec) for name, spec in specs.items()], tied_names(lm), bucket_bytes)


async def sync(lm: torch.nn.Module, engine: Any, version: int) -> Ack:
    """Send a model's weights, as a trainer would. The engine has been reconciled."""
    layout, weights = layout_of(lm), _weights(lm)
    header = make_header(layout, version, {name: digest(p) for name, p in weights.items()})
    (ack,) = await send_weights(header, iter_buckets(layout, weights.items()), [engine])
    return ack


def _weights(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in lm.named_parameters()} | persistent_buffers(lm)
