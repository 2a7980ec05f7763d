"""A decoder's forward for sampling, in a third of the operations.

Transformers' module of a Llama-like decoder runs 45 small operations a layer; for few tokens the time goes to their
dispatch, not to their arithmetic. Here q, k and v are one fused matrix product, gate and up another, query and key
heads are rotated together, and no module is called. There is no list of supported models: the modules must have the
expected submodules, and the result must equal Transformers' forward on probe tokens. All other models use Transformers'
modules.

Letters: T new tokens, D hidden size, H query heads, K key/value heads, S head size, F inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from meshrl.config.model import num_positions
from meshrl.core.device import has_triton
from meshrl.model.attention import AttentionContext, AttentionSpec, PackedAttention, RotatingContext, Rotation
from meshrl.model.causal import CausalModel
from meshrl.model.lora import Adapter, adapter_of, base_layer_of
from meshrl.model.parts import TEXT
from meshrl.model.prepack import Product, prepacked
from meshrl.model.verify import computed_in_fp32, in_fp32
from meshrl.plan.decisions import PACK_BYTES

# Largest difference of a hidden state, relative to the largest one, in fp32. Rounding stays below it; a scale or norm
# that is not computed here changes a hundred times more.
RELATIVE_TOLERANCE = 1e-4
TABLE_POSITIONS = 1 << 17  # models with more positions compute the rotations in each step
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("q_proj", "k_proj", "v_proj")
_BACKBONE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_BLOCK = {"self_attn", "mlp", *_NORMS}
_ATTENTION = {*_QKV, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FastDecoder:
    """Embedding, pre-norm layers with rotary attention and SiLU-gated MLP, final norm; reads the model's parameters."""

    def __init__(self, base: Any, specs: Sequence[AttentionSpec], has_grid: bool = False):
        """has_grid: it rotates by three positions, which are equal for tokens of text."""
        self.embedding, self._rotary, self._has_grid = base.embed_tokens.weight, base.rotary_emb, has_grid
        self._num_positions = num_positions(base.config.to_dict()) or TABLE_POSITIONS + 1
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.layers = [_Layer(i, block, spec) for i, (block, spec) in enumerate(zip(base.layers, specs, strict=True))]
        self.norm = _Norm(base.norm)

    def hidden(self, tokens: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """As CausalModel.hidden: tokens int64[T], position_ids int64[T] -> final hidden states [T, D]."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self._rotation(x, position_ids)
        added = None
        for layer in self.layers:
            added = layer(x, added, cos, sin, context)
        return self.norm(x, added)

    def _rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, S], from a table of all positions: its size must not depend on position_ids, which
        would have to be read from the device in each step. (Rotations that depend on the length of a row change only
        above num_positions.)"""
        if self._num_positions > TABLE_POSITIONS:
            return self._cos_sin(x, position_ids)
        table = self._table
        if table is None or (table[0].dtype, table[0].device) != (x.dtype, x.device):
            table = self._table = self._cos_sin(x, torch.arange(self._num_positions, device=x.device))
        return table[0].index_select(0, position_ids), table[1].index_select(0, position_ids)

    def _cos_sin(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half of the sines is negated, so that a rotation is a swap of halves."""
        at = positions.expand(3, 1, -1) if self._has_grid else positions[None]
        cos, sin = (rotation.flatten(0, -3)[0, :, None] for rotation in self._rotary(x[None], at))
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

    def fuse(self) -> None:
        """Move the weights of each fused product into one joint tensor; the parameters become views of it."""
        for linear in self._fused():
            linear.fuse()

    def joint(self) -> dict[int, torch.Tensor]:
        """Parameter id -> the view of a joint tensor that is multiplied instead of this parameter."""
        return {id(p): view for linear in self._fused() for p, view in linear.joint()}

    def split(self) -> None:
        """Free the joint tensors. Call `fuse` again once the parameters have their new memory."""
        for linear in self._fused():
            linear.split()

    def pack(self) -> None:
        """Make a copy of the current weights that multiplies faster. Call `unpack` before the weights change."""
        if sum(linear.num_bytes for linear in self._fused()) <= PACK_BYTES:
            for linear in self._fused():
                linear.pack()

    def unpack(self) -> None:
        for linear in self._fused():
            linear.unpack()

    def _fused(self) -> list[_FusedLinear]:
        return [linear for layer in self.layers for linear in layer.fused]


@torch.no_grad()
def fast_decoder(model: CausalModel) -> FastDecoder | None:
    """The fast decoder of this model, None if it has none. The comparison is in fp32: rounding to bf16 would hide
    differences."""
    probe = _Probe(model)
    base: Any = model.lm.get_submodule(model.parts[TEXT].module)
    with in_fp32(model):
        expected = model.hidden(probe.tokens, probe.positions, probe)
        if not _fits(base) or sorted(probe.specs) != list(range(len(base.layers))):
            return None
        if any(spec.sinks is not None for spec in probe.specs.values()):  # parameters that this class does not know
            return None
        has_grid = model.inputs.family is not None and model.inputs.family.has_grid
        fast = FastDecoder(base, [spec for _, spec in sorted(probe.specs.items())], has_grid)
        compared = FastDecoder(base, [layer.spec for layer in fast.layers], has_grid)
        pairs = zip(base.layers, fast.layers, strict=True)
        compared.layers = [partial(computed_in_fp32, *pair) for pair in pairs]  # type: ignore[misc]
        difference = (compared.hidden(probe.tokens, probe.positions, probe) - expected).abs().max()
    return fast if difference / expected.abs().max() <= RELATIVE_TOLERANCE else None


class _Probe(PackedAttention):
    """Two packed rows of fixed tokens, one at the first positions and one at the last ones of the model, where some
    models scale their queries. Records the attention parameters of each layer."""

    def __init__(self, model: CausalModel):
        device = model.head().weight.device
        rows = [torch.arange(n, device=device) * 5 % (model.vocab_size - 1) + 1 for n in (11, 6)]
        super().__init__([0, len(rows[0]), len(rows[0]) + len(rows[1])], device)
        self.tokens = torch.cat(rows)
        last = max(0, (num_positions(model.lm.config.to_dict()) or 0) - len(rows[1]))
        self.positions = torch.cat([torch.arange(len(row), device=device) + at for row, at in zip(rows, (0, last))])
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.specs[layer] = spec
        return super().attend(layer, q, k, v, spec)


class _FusedLinear:
    """Linear layers of one input as one matrix product: x [T, in] -> [T, sum of out]."""

    def __init__(self, parts: Sequence[Any]):
        """parts: torch.nn.Linear, or peft's wrapper of one."""
        self._parts = [base_layer_of(part) for part in parts]
        self._adapters: list[tuple[int, int, Adapter]] = []  # first column, end, adapter of these columns
        self._joint: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._packed: Product | None = None
        end = 0
        for part in parts:
            start, end = end, end + part.out_features
            adapter = adapter_of(part)
            if adapter is not None:
                self._adapters.append((start, end, adapter))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._plain(x)
        for start, end, adapter in self._adapters:
            y[..., start:end] += F.linear(F.linear(x, adapter.a), adapter.b) * adapter.scale
        return y

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x, self._bias)
        if self._joint is not None:
            return F.linear(x, self._joint, self._bias)
        return torch.cat([part(x) for part in self._parts], dim=-1)

    @property
    def num_bytes(self) -> int:
        return sum(part.weight.nbytes for part in self._parts)

    def fuse(self) -> None:
        biases = [part.bias for part in self._parts]
        self._joint = _joined([part.weight for part in self._parts])
        self._bias = None if biases[0] is None else _joined(biases)

    def joint(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for joint, own in ((self._joint, "weight"), (self._bias, "bias")):
            if joint is not None:
                parameters = [getattr(part, own) for part in self._parts]
                yield from zip(parameters, joint.split([len(p) for p in parameters]), strict=True)

    def split(self) -> None:
        self._joint = self._bias = None

    def pack(self) -> None:
        assert self._joint is not None, "call fuse before pack"
        self._packed = prepacked(self._joint)

    def unpack(self) -> None:
        self._packed = None


class _Norm:
    """RMSNorm; x / rms(x) is rounded before it is multiplied by the weight, as in Transformers' modules."""

    def __init__(self, module: Any):
        self.weight, self.eps = module.weight, module.variance_epsilon

    def __call__(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """added: is added to x before, in its memory."""
        kernels = _kernels(x)
        if kernels is not None and x.dim() == 2:
            return kernels.norm(x, self.weight, self.eps, added)  # type: ignore[no-any-return]
        if added is not None:
            x += added
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(_scalar(self.eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(wide, scale).to(x.dtype).mul_(self.weight)


class _Layer:
    def __init__(self, index: int, block: Any, spec: AttentionSpec):
        attention, mlp = block.self_attn, block.mlp
        self.index, self.spec, size = index, spec, attention.head_dim
        self.heads = (attention.q_proj.out_features // size, attention.k_proj.out_features // size)  # H, K
        self.before_attention = _Norm(block.input_layernorm)
        self.qkv = _FusedLinear([getattr(attention, name) for name in _QKV])
        q_norm = getattr(attention, "q_norm", None)
        self.head_norms = None if q_norm is None else (_Norm(q_norm), _Norm(attention.k_norm))
        self.out = _FusedLinear([attention.o_proj])
        self.before_mlp = _Norm(block.post_attention_layernorm)
        self.gate_up = _FusedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = _FusedLinear([mlp.down_proj])
        self.fused = [self.qkv, self.out, self.gate_up, self.down]

    def __call__(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """The result of the MLP, which the next norm adds to x [T, D]. x: gets `added`, the result of the layer before,
        and that of the attention. cos and sin [T, 1, S], the first half of sin negated."""
        qkv = self.qkv(self.before_attention(x, added)).view(x.shape[0], sum(self.heads) + self.heads[1], -1)
        attended = self._attended(qkv, cos, sin, context)
        gate_up = self.gate_up(self.before_mlp(x, self.out(attended.reshape(x.shape[0], -1))))
        if (kernels := _kernels(x)) is not None:
            return self.down(kernels.gate(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    def _attended(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """qkv [T, H + 2 K, S] -> [T, H, S]"""
        (h, k), norms, kernels = self.heads, self.head_norms, _kernels(qkv)
        q, keys, values = qkv.split([h, k, k], dim=1)
        if kernels is not None:
            weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
            rotation = Rotation(cos, sin, weights)
            if isinstance(context, RotatingContext):
                return context.attend_rotated(self.index, q, keys, values, self.spec, rotation)
            qk = kernels.rotate(qkv, self.heads, rotation)
        else:
            qk = qkv[:, : h + k]
            if norms is not None:
                qk = torch.cat([norms[0](q), norms[1](keys)], dim=1)
            qk = (qk * cos).addcmul_(qk.roll(qk.shape[-1] // 2, -1), sin)
        return context.attend(self.index, qk[:, :h], qk[:, h:], values, self.spec)


def _kernels(x: torch.Tensor) -> Any:
    """The kernels, for 16-bit numbers on a device that has them; None otherwise."""
    return _kernels_of(x.device) if x.dtype.itemsize == 2 else None


@lru_cache(maxsize=8)
def _kernels_of(device: torch.device) -> Any:
    if not has_triton(device):
        return None
    from meshrl.model import kernels

    return kernels


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def _joined(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    joint = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return joint


def _fits(base: Any) -> bool:
    """Whether the model has exactly the submodules that are computed here. Their arithmetic is compared afterwards."""
    from transformers.activations import SiLUActivation  # here, because a controller does not need it

    def children(module: torch.nn.Module) -> set[str]:
        return {name for name, _ in module.named_children()}

    def block_fits(block: Any) -> bool:
        if children(block) != _BLOCK:
            return False
        attention, mlp = block.self_attn, block.mlp
        parts = children(attention)
        if parts not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or children(mlp) != _MLP:
            return False
        linears = [*(getattr(attention, name) for name in _ATTENTION), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms = [*(getattr(block, name) for name in _NORMS), *(getattr(attention, n) for n in parts & _HEAD_NORMS)]
        return (
            isinstance(mlp.act_fn, torch.nn.SiLU | SiLUActivation)
            and all(type(base_layer_of(m)) is torch.nn.Linear for m in linears)
            and all(hasattr(m, "variance_epsilon") for m in [base.norm, *norms])
            and len({getattr(attention, name).bias is None for name in _QKV}) == 1
            and (mlp.gate_proj.bias is None) == (mlp.up_proj.bias is None)
            and hasattr(attention, "head_dim")
        )

    return children(base) == _BACKBONE and all(map(block_fits, base.layers))
