"""What the embedded engine accepts: every request is checked when it arrives, so that no step can fail on it."""

from __future__ import annotations

from meshrl.core.errors import CapabilityError
from meshrl.core.types import Request
from meshrl.rollout.accept import bounds_of
from meshrl.rollout.embedded.sampler import topk_of
from meshrl.rollout.embedded.scheduler import Sequence
from meshrl.rollout.stop_strings import StopStrings


def accept(
    request: Request,
    stop_token_ids: tuple[int, ...],
    stop_strings: StopStrings,
    max_context_tokens: int,
    vocab_size: int,
) -> Sequence:
    """A request as the scheduler wants it. Raises: RequestError, CapabilityError."""
    bounds = bounds_of(request, stop_token_ids, max_context_tokens, vocab_size)
    _check_capabilities(request)
    return Sequence(
        request=request,
        stop_ids=bounds.stop_ids,
        limit=bounds.limit,
        limit_reason=bounds.limit_reason,
        stop_search=stop_strings.search(request),
    )


def _check_capabilities(request: Request) -> None:
    if request.media or request.media_spans:
        raise CapabilityError(f"request {request.id} has media; the embedded engine takes text only")
    if request.adapter is not None:
        raise CapabilityError(f"request {request.id} names adapter {request.adapter!r}; the embedded engine has none")
    for name in request.want:
        if name != "entropy" and topk_of(name) < 1:
            raise CapabilityError(
                f"request {request.id} wants {name!r}; the embedded engine gives 'entropy' and 'topk:N' (N >= 1)"
            )
