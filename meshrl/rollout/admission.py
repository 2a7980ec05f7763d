"""The checks that every engine makes when it gets a request (weight version, ids, room, stop ids, sampling parameters,
extras), so that no step can fail because of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from meshrl.core.errors import CapabilityError, RequestError, StaleWeightsError
from meshrl.core.types import Request, SamplingParams, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Where a request ends: at one of stop_ids, or after `limit` new tokens, with the stop reason limit_reason."""

    stop_ids: frozenset[int]
    limit: int
    limit_reason: StopReason


def check_admission(request: Request, engine_id: str, version: int, closed: bool, unfinished: Container[str]) -> None:
    """version: the weight version that the engine will sample with. unfinished: ids of unfinished requests."""
    if version < max(request.min_version, 0):
        raise StaleWeightsError(
            f"{engine_id} has weight version {version}, request {request.id} needs {request.min_version} or more (-1 = "
            "none is committed); sync weights first, or call trust_loaded_weights() to sample with the weights of the "
            "model folder"
        )
    if closed or request.id in unfinished:
        reason = "this engine is closed" if closed else "a request with that id is not finished; ids must be unique"
        raise RequestError(f"request {request.id}: {reason}")


def check_supported(
    request: Request,
    engine: str,
    has_extra: Callable[[str], bool] = lambda name: False,
    extras: str = "none",
    takes_media: bool = False,
) -> None:
    """Refuse what this engine does not support.

    engine, extras: their names in the error.
    """
    if request.media_spans and not takes_media:
        raise CapabilityError(f"request {request.id} has images; {engine} takes text only with this model")
    if request.adapter is not None:
        raise CapabilityError(f"request {request.id} names adapter {request.adapter!r}; {engine} has none")
    for name in request.want:
        if not has_extra(name):
            raise CapabilityError(f"request {request.id} wants {name!r}; the extras that {engine} returns: {extras}")


def topk_of(name: str) -> int:
    """N of the extra "topk:N"; 0 for any other name."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "topk" and number.isdecimal() else 0


def bounds_of(request: Request, stop_token_ids: tuple[int, ...], max_context_tokens: int, vocab_size: int) -> Bounds:
    """A request ends at the engine's stop ids (unless ignore_eos) or its own, at max_new_tokens ("length"), or where
    max_context_tokens leaves no room ("context"). Stop strings are searched separately (stop_strings.py)."""
    context, prefix = np.asarray(request.context_ids), np.asarray(request.prefix_output)
    _check_ids(request, "context_ids", context, vocab_size)
    _check_ids(request, "prefix_output", prefix, vocab_size)
    if not len(context):
        raise RequestError(f"request {request.id}: context_ids is empty; the model needs one token to start from")
    if request.max_new_tokens <= len(prefix):
        raise RequestError(
            f"request {request.id}: max_new_tokens is {request.max_new_tokens} and prefix_output already has "
            f"{len(prefix)} tokens; max_new_tokens counts the prefix, too, so it must be larger"
        )
    room = max_context_tokens - len(context) - len(prefix)
    if room < 1:
        raise RequestError(
            f"request {request.id}: {len(context)} context + {len(prefix)} prefix tokens can never fit; this engine "
            f"takes {max_context_tokens} tokens per request, and at least one of them is new. Shorten the context, or "
            "raise rollout.max_context_tokens if the model allows it"
        )
    _check_sampling(request.id, request.sampling)
    wanted = request.max_new_tokens - len(prefix)
    own_stops = request.sampling.stop_token_ids
    stop_ids = frozenset(own_stops if request.sampling.ignore_eos else (*stop_token_ids, *own_stops))
    return Bounds(stop_ids=stop_ids, limit=min(wanted, room), limit_reason="length" if wanted <= room else "context")


def _check_ids(request: Request, name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.ndim != 1 or (len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size)):
        raise RequestError(
            f"request {request.id}: {name} must be one row of ids from 0 to {vocab_size - 1}; it has shape "
            f"{list(ids.shape)}" + (f" and ids from {ids.min()} to {ids.max()}" if ids.size else "")
        )


def _check_sampling(request_id: str, p: SamplingParams) -> None:
    limits = {
        "temperature": (p.temperature, "0 (greedy) or more", 0 <= p.temperature < math.inf),
        "top_p": (p.top_p, "above 0, at most 1", 0 < p.top_p <= 1),
        "top_k": (p.top_k, "0 (off) or more", p.top_k >= 0),
        "min_p": (p.min_p, "from 0 to below 1", 0 <= p.min_p < 1),
        "repetition_penalty": (p.repetition_penalty, "above 0", 0 < p.repetition_penalty < math.inf),
    }
    for name, (value, allowed, fits) in limits.items():
        if not fits:
            raise RequestError(f"request {request_id}: sampling.{name} is {value}; allowed: {allowed}")
    if isinstance(p.stop, str) or not all(isinstance(text, str) and text for text in p.stop):
        raise RequestError(
            f"request {request_id}: sampling.stop is {p.stop!r:.80}; allowed: a list of strings, none of them empty"
        )
