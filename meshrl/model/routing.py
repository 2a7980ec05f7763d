"""The routers of a mixture of experts: what they select is counted, balanced by a loss, recorded and replayed.

Transformers' class states which modules are routers, for its own record of router logits. Their forward is wrapped, so
that the family's own code computes logits and scores.

Letters: T tokens, L routers in the order of the model's modules, E experts, K experts selected for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from meshrl.core.errors import ConfigError
from meshrl.core.types import Metric
from meshrl.model.limits import OTHER_ROUTERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class RouterSums:
    """Sums over tokens, each counted as often as rows have it. selected: int64[L, E], how many tokens selected each
    expert; probabilities: [L, E], of the softmax of the logits; entropy: [L], its entropy in nats."""

    selected: torch.Tensor
    probabilities: torch.Tensor
    entropy: torch.Tensor

    def add(self, router: int, logits: torch.Tensor, selected: torch.Tensor, rows: torch.Tensor) -> None:
        """logits [T, E], selected int64[T, K], rows int64[T]: how many rows each token is a part of."""
        probs = _probabilities(logits)
        weights = rows.to(probs.dtype)
        self.selected[router].index_add_(0, selected.flatten(), rows.repeat_interleave(selected.shape[-1]))
        # No matrix product, because checkpointing.py may store products by their order, and this is not repeated.
        self.probabilities[router] += (weights[:, None] * probs).sum(0)
        self.entropy[router] += (weights * torch.special.entr(probs).sum(-1)).sum()

    def metrics(self) -> list[Metric]:
        """Of all ranks' sums. `router/balance_loss` is 1 if all experts have the same load."""
        tokens = self.probabilities.double().sum(-1)  # [L]
        of_mean = self.selected / self.selected.double().mean(-1, keepdim=True)
        balance = (of_mean * self.probabilities).sum(-1) / tokens
        dead = (self.selected == 0).double().mean(-1)
        means = {
            "router/entropy": (self.entropy / tokens, "nats"),
            "router/balance_loss": (balance, ""),
            "router/dead_experts": (dead, "fraction"),
        }
        metrics = [Metric(name=n, sum=float(x.sum()), weight=len(x), unit=unit) for n, (x, unit) in means.items()]
        return [*metrics, Metric(name="router/max_load", sum=float(of_mean.max()), reduce="max")]


class Routing:
    """The routers of one model. What `begin` sets stays until the next call, so that forward passes that activation
    checkpointing repeats compute the same; `end` ends the counting.

    dtype: in which routers compute at least; None = as Transformers does. records: whether `recorded` has what the
    newest forward selected. sums: of all counted forward passes since it was set to None.
    """

    def __init__(self, routers: Sequence[torch.nn.Module], logits_at: int):
        """logits_at: of the logits in a router's output (logits, scores, selected experts), or its reverse."""
        self.routers, self.logits_at = routers, logits_at
        self.dtype: torch.dtype | None = None
        self.records = False
        self.sums: RouterSums | None = None
        self._is_counting = False
        self._rows: torch.Tensor | None = None
        self._replayed: torch.Tensor | None = None
        self._pressure: torch.Tensor | None = None  # [L, E]: gradient of the loss with respect to probabilities
        self._recorded: dict[int, torch.Tensor] = {}
        for number, router in enumerate(routers):
            router.forward = partial(self._route, number, router, router.forward)

    @classmethod
    def of(cls, lm: PreTrainedModel, text: torch.nn.Module) -> Routing | None:
        """None if the model has no router, or one that does not return (logits, scores, selected experts). text: its
        language model."""
        from transformers.utils.output_capturing import OutputRecorder

        recorder = (getattr(text, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(recorder, OutputRecorder) or recorder.index not in (0, 2):
            return None
        if lm.config.get_text_config().model_type in OTHER_ROUTERS:
            return None
        kind, name = recorder.target_class, recorder.layer_name or ""
        routers = [m for path, m in lm.named_modules() if isinstance(m, kind) and name in path]
        return cls(routers, recorder.index) if routers and kind is not torch.nn.Linear else None

    def begin(self, rows: torch.Tensor | None, replayed: torch.Tensor | None, counts: bool = False) -> None:
        """Before a forward. rows int64[T]: how many rows each token is a part of. replayed int16[T, L, K]: the experts
        to select; -1 = the router chooses. counts: whether it adds to `sums`."""
        self._rows, self._replayed, self._is_counting = rows, replayed, counts

    def end(self) -> None:
        self._is_counting = False

    def recorded(self) -> torch.Tensor:
        """int16[T, L, K]: what the newest forward selected."""
        return torch.stack([self._recorded[number] for number in range(len(self.routers))], dim=1)

    def balance(self, sums: RouterSums | None, factor: float = 1.0) -> None:
        """From now on, backward passes add the gradient of factor * the load-balance loss, in which the share of tokens
        that select each expert is held fixed: that of `sums`, of the complete optimizer step. None = no such loss.

        Source: Fedus et al. 2021, equations 4 to 6, the mean over routers; K if all experts have the same load, as
        Transformers computes it.
        """
        self._pressure = None
        if sums is not None:
            tokens = sums.probabilities.double().sum(-1, keepdim=True)  # [L, 1]
            shares = sums.selected / tokens
            scale = factor * shares.shape[1] / len(shares)
            self._pressure = (scale * shares / tokens).to(sums.probabilities.dtype)

    def _route(
        self, number: int, router: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with self._computing(number, router):
            out = list(forward(self._widened(args[0]), *args[1:], **kwargs))
        logits, selected = out[self.logits_at].flatten(0, -2), out[2 - self.logits_at]
        if self.records:
            self._recorded[number] = selected.to(torch.int16)
        if self._rows is None:
            return tuple(out)
        if self._is_counting:
            if self.sums is None:
                shape = len(self.routers), logits.shape[-1]
                wide = torch.promote_types(logits.dtype, torch.float32)
                zeros = logits.new_zeros(shape, dtype=wide)
                self.sums = RouterSums(zeros.long(), zeros, zeros[:, 0].clone())
            self.sums.add(number, logits.detach(), selected, self._rows)
        if self._pressure is not None and torch.is_grad_enabled():
            loss = (_probabilities(logits) @ self._pressure[number]) @ self._rows.to(self._pressure.dtype)
            out[1] = _WithLoss.apply(out[1], loss)
        return tuple(out)

    def _widened(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.dtype is None else hidden.to(torch.promote_types(hidden.dtype, self.dtype))

    @contextmanager
    def _computing(self, number: int, router: torch.nn.Module) -> Iterator[None]:
        """The context of a router's own forward, with parameters of the required precision and selected experts."""
        modules = router.modules() if self.dtype is not None else ()
        narrow = [(module, dict(module._parameters)) for module in modules]
        try:
            for module, own in narrow:
                module._parameters.update({n: p if p is None else self._widened(p) for n, p in own.items()})  # type: ignore[misc]
            with self._replaying(number, router):
                yield
        finally:
            for module, own in narrow:
                module._parameters.update(own)

    def _replaying(self, number: int, router: torch.nn.Module) -> AbstractContextManager[Any]:
        if self._replayed is None:
            return nullcontext()
        num_experts = max(p.shape[0] for p in router.parameters() if p.ndim == 2)
        return _Selection(self._replayed[:, number].long(), num_experts)


def require_routing(routing: Routing | None, path: str, without: str) -> Routing:
    """The routers, for a key that needs them. without: the key's value for other models."""
    if routing is None:
        raise ConfigError(
            f"{path!r} is no mixture of experts, or its routers do not return logits, scores and selected experts, by "
            f"which meshrl knows them. Use {without}"
        )
    return routing


class _Selection(TorchFunctionMode):
    """Inside, the best K of E experts of each token are those of `selected` int64[T, K], where they are not -1."""

    def __init__(self, selected: torch.Tensor, num_experts: int):
        super().__init__()
        self._selected, self._num_experts = selected, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return out
        index = torch.where(self._selected >= 0, self._selected, out.indices)
        return torch.return_types.topk((args[0].gather(-1, index), index))


class _WithLoss(torch.autograd.Function):
    """Scores, whose backward pass adds the gradient of a loss, so that it is a part of the block's backward pass."""

    @staticmethod
    def forward(ctx, scores, loss):  # type: ignore[override]
        ctx.one = torch.ones_like(loss)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, ctx.one


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
