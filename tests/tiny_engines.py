"""Embedded engines with tiny models, run without an event loop; and the same weights in plain Transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.core.types import Request, SamplingParams, Turn
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import fast_decoder
from meshrl.model.hub_names import HubNames
from meshrl.rollout.embedded.engine import EmbeddedEngine
from meshrl.sync.delivery import Delivery
from meshrl.sync.layout import Ack, Layout, SyncHeader, make_layout
from meshrl.sync.sender import WeightSender
from meshrl.train.weights import RankWeights, rank_weights


def tiny_engine(lm: torch.nn.Module, trusted: bool = True, **changes: Any) -> EmbeddedEngine:
    """An engine with a copy of the model; its weights count as version 0 unless trusted is False."""
    facts: dict[str, Any] = dict(stop_token_ids=(), max_running=8, max_context_tokens=256, engine_id="tiny")
    model = CausalModel(copy.deepcopy(lm).eval().requires_grad_(False))
    engine = EmbeddedEngine(model, device=torch.device("cpu"), fast=fast_decoder(model), **{**facts, **changes})
    if trusted:
        engine.trust_loaded_weights()
    return engine


def ask(name: str, context: Iterable[int], *, temperature: float = 1.0, **changes: Any) -> Request:
    """A request; changes: fields of Request and of SamplingParams."""
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    return Request(
        id=name,
        context_ids=np.array(list(context), np.int32),
        sampling=SamplingParams(temperature=temperature, **sampling),
        **{"max_new_tokens": 16, **changes},
    )


def run(engine: EmbeddedEngine, requests: Iterable[Request]) -> dict[str, Turn]:
    """Step until all requests are finished."""
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
    model = type(lm)._from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(lm.state_dict())
    return model


def scores(lm: torch.nn.Module, ids: Iterable[int]) -> np.ndarray:
    """Teacher-forced logprobs at temperature 1, as a trainer computes them: float32[T], index 0 is 0."""
    model = lm if isinstance(lm, CausalModel) else CausalModel(copy.deepcopy(lm).eval())
    tokens = torch.tensor([int(i) for i in ids], device=model.head().weight.device)
    places, ones = torch.arange(len(tokens), device=tokens.device), torch.ones(len(tokens) - 1, device=tokens.device)
    context = PackedAttention([0, len(tokens)], tokens.device)
    with torch.no_grad():
        logprobs, _ = model(tokens, places, context, places[1:], places[:-1], ones, None, False, {})
    return np.concatenate([np.zeros(1, np.float32), logprobs.float().cpu().numpy()])


def layout_of(lm: torch.nn.Module, transfer_bytes: int = 4096) -> Layout:
    """The layout of this model for one sender, in the model's dtype."""
    held = _held(lm)
    return make_layout(held.tensors, [held.boxes()], held.tied, transfer_bytes)


def deliveries(lm: torch.nn.Module, layout: Layout) -> Iterator[Delivery]:
    """All transfers of `layout_of`, each in its own memory."""
    sender = WeightSender(layout, 0, keep_base=False)
    sender.begin(_held(lm).sources)
    for transfer in layout.transfers:
        yield sender.fill(transfer, torch.empty(layout.slot_bytes, dtype=torch.uint8))


async def sync(lm: torch.nn.Module, engine: Any, version: int, transfer_bytes: int = 4096) -> Ack:
    """Send a model's weights as a trainer does, after `reconcile`."""
    layout = layout_of(lm, transfer_bytes)
    try:
        await engine.begin(SyncHeader(version=version, layout_hash=layout.hash))
        for delivery in deliveries(lm, layout):
            await engine.receive(delivery)
        ack: Ack = await engine.commit()
    except BaseException:
        await engine.cancel()
        raise
    return ack


def differences(lm: torch.nn.Module, turn: Turn) -> np.ndarray:
    """By how many nats the logprobs of a turn's tokens differ from those of Transformers' own forward."""
    ids = torch.tensor([*turn.context_ids, *turn.output_ids])
    with torch.no_grad():
        logits = plain(lm)(input_ids=ids[None]).logits[0].float()
    expected = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[len(turn.context_ids) - 1 :, 0]
    return np.abs(turn.logprobs - expected.numpy())


async def distance(engine: Any, lm: torch.nn.Module, context: Sequence[int], name: str, **more: Any) -> float:
    """The largest difference of a turn that the engine samples."""
    return float(differences(lm, await engine.generate(ask(name, context, seed=1, ignore_eos=True, **more))).max())


async def check_samples_from(engine: Any, lm: torch.nn.Module, context: list[int], name: str) -> Turn:
    turn: Turn = await engine.generate(ask(name, context, seed=1, ignore_eos=True))
    assert differences(lm, turn).max() < 1e-4
    return turn


def _held(lm: torch.nn.Module) -> RankWeights:
    return rank_weights(lm, HubNames(lm), next(lm.parameters()).dtype)
