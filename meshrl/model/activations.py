"""Bytes of activations, by a trace of one decoder block of each kind on tensors without values: what
a forward pass stores for the backward pass, and the most that exists at one time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from meshrl.core.errors import ConfigError
from meshrl.model.attention import ALIGNED_KEYS, AttentionSpec, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.parallel.checkpointing import checkpoint_blocks
from meshrl.plan.memory import Activations


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as they exist. others: tensors that exist already,
    of which operations make views."""

    def __init__(self, others: Iterable[Any]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, Any] = {x.untyped_storage()._cdata: x for x in others if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self.now += size
            self._seen[key] = weakref.ref(storage, lambda _: self._remove(key, size))

    def _remove(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]


class _Products(TorchDispatchMode):
    """Products of all experts in dtypes for which PyTorch has no rule of shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            a, b, ends = (*args, *(kwargs or {}).values())[:3]
            experts = [len(ends)] * (a.dim() == b.dim())
            return a.new_empty(*experts, a.shape[-2], b.shape[-1])
        return func(*args, **(kwargs or {}))


class TracedAttention(PackedAttention):
    """Attention of tensors without values. has_kernel: as an accelerator's kernel for packed rows, which stores its
    operands, its result and a log-sum for each query, in each layer that it can compute; else as this CPU."""

    def __init__(self, cu_seqlens: list[int], has_kernel: bool):
        super().__init__(cu_seqlens, torch.device("cpu"))
        self._has_kernel = has_kernel
        for align in (1, ALIGNED_KEYS):
            self.padded(align)  # while tensors have values

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.use_varlen = self._has_kernel
        is_flash = self._choose(q, v, spec)[0] == "flash"
        self.use_varlen = False
        return _Kernel.apply(q, k, v) if is_flash else super().attend(layer, q, k, v, spec)  # type: ignore[no-any-return]


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[override]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def trace(model: CausalModel, tokens: int, longest: int, has_kernel: bool, mode: bool | str = False) -> Activations:
    """Of the language model's blocks, for a pack of rows of `longest` tokens. model: on the meta device, in its compute
    dtype; it can't be used afterwards. mode: of train.activation_checkpointing.

    Raises: ConfigError if a block computes with values, such as the number of an expert's tokens."""
    bounds = [*range(0, tokens, min(longest, tokens)), tokens]
    context = TracedAttention(bounds, has_kernel)
    positions = [torch.arange(b - a) for a, b in itertools.pairwise(bounds)]
    with FakeTensorMode(allow_non_fake_inputs=True), _Products():
        _move(model)
        checkpoint_blocks(model.layers, mode if mode in ("submodule", "selective") else False)
        try:
            calls, hidden = _calls(model, context, torch.cat(positions))
            by_kind = {kind: _bytes_of(*call) for kind, call in calls.items()}
        except (RuntimeError, UnsupportedFakeTensorException) as cause:  # those of torch's that name an operation
            raise ConfigError(f"activations of {type(model.lm).__name__} are unknown: {cause!s:.200}") from cause
        stored, forward, backward = zip(*[by_kind[kind] for kind in _kinds(model)], strict=True)
    return Activations(
        hidden=hidden.untyped_storage().nbytes(), stored=sum(stored), forward=max(forward), backward=max(backward)
    )


def _move(model: torch.nn.Module) -> None:
    """From the meta device to tensors without values of the CPU, tied ones once."""
    moved = dict[int, torch.Tensor]()
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))  # type: ignore[assignment]
        for tensors in places:
            for name, x in tensors.items():
                if isinstance(x, torch.Tensor):
                    fake = torch.empty(x.shape, dtype=x.dtype, device="cpu")
                    new = torch.nn.Parameter(fake, x.requires_grad) if isinstance(x, torch.nn.Parameter) else fake
                    tensors[name] = moved.setdefault(id(x), new)


def _kinds(model: CausalModel) -> list[str]:
    """By block: equal texts for blocks that compute the same."""
    types = getattr(model.lm.config.get_text_config(), "layer_types", None) or ()
    return [
        repr((type(block), types[i : i + 1], [(name, p.shape) for name, p in block.named_parameters()]))
        for i, block in enumerate(model.layers)
    ]


def _calls(
    model: CausalModel, context: TracedAttention, positions: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """The first block of each kind, with the arguments that the model calls it with; and the final hidden states."""
    calls, outs = dict[str, Any](), dict[str, Any]()

    def recorded(kind: str, block: Any) -> Callable[..., Any]:
        forward = block.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if kind not in calls:
                calls[kind] = block, forward, args, kwargs
                outs[kind] = forward(*args, **kwargs)
            return tree_map_only(torch.Tensor, torch.empty_like, outs[kind])

        return call

    for kind, block in zip(_kinds(model), model.layers, strict=True):
        block.forward = recorded(kind, block)
    with torch.no_grad():
        hidden = model.hidden(torch.zeros_like(positions), positions, context)
    return calls, hidden


def _bytes_of(
    block: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int, int]:
    """(stored by the forward pass, also the block's input if that is read again; most during the forward pass without
    the input; most during the backward pass with the stored ones, and with one parameter's gradient)."""
    for p in block.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(_drop_gradient)
    start = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
    with LiveBytes([start, *block.parameters(), *block.buffers(), *tree_iter((args, kwargs))]) as live:
        x = start.clone()  # a leaf would be held by the graph
        out = forward(x, *args[1:], **kwargs) if args else forward(**(kwargs | {"hidden_states": x}))
        most = live.most - x.untyped_storage().nbytes()
        del x
        out = out[0] if isinstance(out, tuple) else out
        stored, live.most = live.now - out.untyped_storage().nbytes(), 0
        out = out.backward(torch.empty_like(out))
    return stored, most, live.most


def _drop_gradient(p: torch.Tensor) -> None:
    p.grad = None
