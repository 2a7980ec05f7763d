"""A decoder's forward for sampling, in a third of the operations.

Transformers' module of a Llama-like decoder runs 45 small operations a layer; for a handful of tokens their dispatch,
not their arithmetic, takes the time. Here q, k and v are one product, gate and up another, query and key heads are
rotated at once, and no module is called. Which models this fits is no list of names: the modules must have the right
parts, and the result must equal Transformers' forward on probe tokens. Every other model runs as it is.

Letters: T new tokens, D hidden size, H query heads, K key/value heads, S head size, F inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import SiLUActivation

from meshrl.model import prepack
from meshrl.model.attention import AttentionContext, How, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.lora import Adapter, adapter_of, unadapted

SAME = 1e-4  # of the largest state, in fp32: rounding stays below, an unknown scale or norm is a hundred times more
TABLE_POSITIONS = 1 << 16  # whose rotations are kept
PACK_BYTES = 1 << 30  # of weights that are held twice for speed; larger models multiply the parameters themselves
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("q_proj", "k_proj", "v_proj")
_BACKBONE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_BLOCK = {"self_attn", "mlp", *_NORMS}
_ATTENTION = {*_QKV, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LeanDecoder:
    """Embedding, pre-norm layers with rotary attention and a SiLU-gated MLP, final norm; reads the live parameters."""

    def __init__(self, base: Any, hows: Sequence[How]):
        self.embedding, self._rotary = base.embed_tokens.weight, base.rotary_emb
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.layers = [_layer(i, block, how) for i, (block, how) in enumerate(zip(base.layers, hows, strict=True))]
        self.norm = _norm(base.norm)

    def hidden(self, tokens: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """What CausalModel.hidden computes: tokens int64[T], position_ids int64[T] -> final hidden states [T, D]."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self._rotation(x, position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        return self.norm(x)

    def _rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, S], out of a table of the first positions; far ones are computed each time."""
        end = int(position_ids.max()) + 1
        if end > TABLE_POSITIONS:
            return self._turns_of(x, position_ids)
        known = self._table
        if known is None or len(known[0]) < end or (known[0].dtype, known[0].device) != (x.dtype, x.device):
            places = torch.arange(max(256, 1 << (end - 1).bit_length()), device=x.device)
            known = self._table = self._turns_of(x, places)
        return known[0].index_select(0, position_ids), known[1].index_select(0, position_ids)

    def _turns_of(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half of the sines is negated, so that a rotation is a swap of halves."""
        cos, sin = (turns[0, :, None] for turns in self._rotary(x[None], places[None]))
        half = sin.shape[-1] // 2
        return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

    def fuse(self) -> None:
        """Move the weights of each joint product into one tensor; the parameters stay, as views of it."""
        for product in self._products():
            product.fuse()

    def joint(self) -> dict[int, torch.Tensor]:
        """What is multiplied in the place of each parameter, by the parameter's id: a view of a joint tensor."""
        return {id(p): part for product in self._products() for p, part in product.joint()}

    def split(self) -> None:
        """Let go of the joint tensors; `fuse` after the parameters have got other memory."""
        for product in self._products():
            product.split()

    def pack(self) -> None:
        """Keep a copy of these very weights that multiplies faster; `unpack` before they change."""
        if sum(product.num_bytes for product in self._products()) <= PACK_BYTES:
            for product in self._products():
                product.pack()

    def unpack(self) -> None:
        for product in self._products():
            product.unpack()

    def _products(self) -> list[_Product]:
        return [product for layer in self.layers for product in layer.products]


@torch.inference_mode()
def lean_decoder(model: CausalModel) -> LeanDecoder | None:
    """The lean forward of this model, if it has one. Compare in fp32: bf16 would hide a difference in its rounding."""
    probe = _Probe(model)
    expected = model.hidden(probe.tokens, probe.places, probe)
    base: Any = model.lm.base_model
    if not _fits(base) or sorted(probe.hows) != list(range(len(base.layers))):
        return None
    lean = LeanDecoder(base, [how for _, how in sorted(probe.hows.items())])
    difference = (lean.hidden(probe.tokens, probe.places, probe) - expected).abs().max() / expected.abs().max()
    return lean if difference <= SAME else None


class _Probe(PackedAttention):
    """Two packed rows of fixed tokens, one at the first positions and one at the last that the model knows, where some
    scale their queries; notes how each layer asks for its attention."""

    def __init__(self, model: CausalModel):
        device = model.head().weight.device
        rows = [torch.arange(n, device=device) * 5 % (model.vocab_size - 1) + 1 for n in (11, 6)]
        super().__init__([0, len(rows[0]), len(rows[0]) + len(rows[1])], device)
        self.tokens = torch.cat(rows)
        last = max(0, (getattr(model.lm.config, "max_position_embeddings", None) or 0) - len(rows[1]))
        self.places = torch.cat([torch.arange(len(row), device=device) + at for row, at in zip(rows, (0, last))])
        self.hows: dict[int, How] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        self.hows[layer] = how
        return super().attend(layer, q, k, v, how)


class _Product:
    """Linear layers of one input, side by side: x [T, in] -> [T, sum of out]."""

    def __init__(self, parts: Sequence[Any]):
        """parts: torch.nn.Linear, or peft's layer around one."""
        self._parts = [unadapted(part) for part in parts]
        self._adapters: list[tuple[int, int, Adapter]] = []  # first column, first after them, what is added there
        self._whole: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
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
            return prepack.linear(x, self._packed, self._bias)
        if self._whole is not None:
            return F.linear(x, self._whole, self._bias)
        return torch.cat([part(x) for part in self._parts], dim=-1)

    @property
    def num_bytes(self) -> int:
        return sum(part.weight.nbytes for part in self._parts)

    def fuse(self) -> None:
        biases = [part.bias for part in self._parts]
        self._whole = _joined([part.weight for part in self._parts])
        self._bias = None if biases[0] is None else _joined(biases)

    def joint(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for whole, own in ((self._whole, "weight"), (self._bias, "bias")):
            if whole is not None:
                parameters = [getattr(part, own) for part in self._parts]
                yield from zip(parameters, whole.split([len(p) for p in parameters]), strict=True)

    def split(self) -> None:
        self._whole = self._bias = None

    def pack(self) -> None:
        assert self._whole is not None, "fuse comes first"
        self._packed = prepack.prepacked(self._whole)

    def unpack(self) -> None:
        self._packed = None


@dataclass(frozen=True, slots=True)
class _Norm:
    """x / rms(x), rounded before the weight comes in, as Transformers' modules do."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(_scalar(self.eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(wide, scale).to(x.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    how: How
    heads: tuple[int, int]  # H, K
    before_attention: _Norm
    qkv: _Product
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: _Product
    before_mlp: _Norm
    gate_up: _Product
    down: _Product

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """x [T, D] is overwritten and returned; cos and sin [T, 1, S], the first half of sin negated."""
        h, k = self.heads
        qkv = self.qkv(self.before_attention(x)).view(len(x), h + 2 * k, -1)
        qk = qkv[:, : h + k]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :h]), self.k_norm(qk[:, h:])], dim=1)
        qk = (qk * cos).addcmul_(qk.roll(qk.shape[-1] // 2, -1), sin)
        attended = context.attend(self.index, qk[:, :h], qk[:, h:], qkv[:, h + k :], self.how)
        x += self.out(attended.reshape(len(x), -1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        x += self.down(F.silu(gate).mul_(up))
        return x

    @property
    def products(self) -> list[_Product]:
        return [self.qkv, self.out, self.gate_up, self.down]


def _layer(index: int, block: Any, how: How) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    q_norm, size = getattr(attention, "q_norm", None), attention.head_dim
    return _Layer(
        index=index,
        how=how,
        heads=(attention.q_proj.out_features // size, attention.k_proj.out_features // size),
        before_attention=_norm(block.input_layernorm),
        qkv=_Product([getattr(attention, name) for name in _QKV]),
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if q_norm is None else _norm(attention.k_norm),
        out=_Product([attention.o_proj]),
        before_mlp=_norm(block.post_attention_layernorm),
        gate_up=_Product([mlp.gate_proj, mlp.up_proj]),
        down=_Product([mlp.down_proj]),
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def _joined(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    whole = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole


def _fits(base: Any) -> bool:
    """Has the model exactly the parts that are known here? Their arithmetic is compared afterwards."""
    return _parts(base) == _BACKBONE and all(
        _parts(block) == _BLOCK
        and _parts(block.self_attn) in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and _parts(block.mlp) == _MLP
        and isinstance(block.mlp.act_fn, torch.nn.SiLU | SiLUActivation)
        and all(type(unadapted(m)) is torch.nn.Linear for m in _linears(block))
        and all(hasattr(m, "variance_epsilon") for m in _norms(base, block))
        and len({getattr(block.self_attn, name).bias is None for name in _QKV}) == 1
        and (block.mlp.gate_proj.bias is None) == (block.mlp.up_proj.bias is None)
        and hasattr(block.self_attn, "head_dim")
        for block in base.layers
    )


def _parts(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _linears(block: Any) -> list[torch.nn.Module]:
    attention, mlp = block.self_attn, block.mlp
    return [getattr(attention, name) for name in _ATTENTION] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _norms(base: Any, block: Any) -> list[torch.nn.Module]:
    inner = [getattr(block.self_attn, name) for name in _HEAD_NORMS if hasattr(block.self_attn, name)]
    return [base.norm, *(getattr(block, name) for name in _NORMS), *inner]
