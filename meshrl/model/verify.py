"""The comparison of our forward with Transformers' own, of a row alone and of packed rows, also with an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from meshrl.core.errors import ConfigError
from meshrl.core.types import Media
from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.model.inputs import Piece, Span
from meshrl.model.logprob import Head
from meshrl.model.parts import Parts, eager_attention
from meshrl.model.routing import require_routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

# Above rounding, below faults. In fp32 other shapes of the same matrix products change a logprob by up to 7e-5 nats
# (mixtures of experts with large logits). A leak between packed rows changes it by more than 1e-2, even in an untrained
# model, which gives all tokens nearly the same probability; an unknown head changes it by more than that.
TOLERANCE_NATS = 2e-3
COMPARED_IDS = 1024  # more than the largest id of the rows that are compared here and in fast_decoder.py


class ScoreDifferences(NamedTuple):
    """Largest differences of a token's logprobs, in nats, between our forward and Transformers' own: of a row alone and
    of packed rows. layers: the layer of each call of our attention for the row alone."""

    alone: torch.Tensor
    packed: torch.Tensor
    layers: list[int]


@contextmanager
def in_fp32(model: CausalModel) -> Iterator[None]:
    """A context in which the forward of a model that is not sharded computes in fp32, whatever dtype its parameters
    have. Norm, embedding and head are cast until its end, the latter two for the first COMPARED_IDS ids only, since
    they may be a third of a model; and each block while it computes."""
    blocks = model.blocks
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    embedding: Any = model.lm.get_input_embeddings()
    head: Any = model.lm.get_output_embeddings()
    of_ids = {id(p) for module in (embedding, head) for p in module.parameters()}
    with ExitStack() as stack:
        stack.enter_context(widened([p for p in model.parameters() if id(p) not in in_blocks], of_ids))
        stack.callback(setattr, embedding, "padding_idx", getattr(embedding, "padding_idx", None))
        embedding.padding_idx = None  # torch requires it to be one of the rows, and uses it for gradients alone
        for block in blocks:
            block.forward = partial(computed_in_fp32, block, block.forward)
            stack.callback(block.__dict__.pop, "forward")
        yield


def computed_in_fp32(block: torch.nn.Module, forward: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of `forward`, which reads the parameters of this block, in fp32."""
    with widened(block.parameters()):
        return forward(*args, **kwargs)


@contextmanager
def widened(parameters: Iterable[torch.nn.Parameter], of_ids: Collection[int] = ()) -> Iterator[None]:
    """A context in which parameters of less than 32 bits are fp32. of_ids: Python's id of those of which only the first
    COMPARED_IDS rows are needed."""
    narrow = [(p, p.data) for p in parameters if p.is_floating_point() and p.dtype.itemsize < 4]
    try:
        for p, _ in narrow:
            p.data = (p.data[:COMPARED_IDS] if id(p) in of_ids else p.data).float()
        yield
    finally:
        for p, values in narrow:
            p.data = values


class _RecordedAttention(attention.PackedAttention):
    """A single row; records the layer of each call."""

    def __init__(self, cu_seqlens: list[int], device: torch.device):
        super().__init__(cu_seqlens, device)
        self.layers: list[int] = []

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        self.layers.append(layer)
        return super().attend(layer, *args)


@dataclass(slots=True)
class _RowWithMedia:
    media: dict[str, Media]
    media_spans: list[Span]


class ComparedModel(CausalModel):
    """A CausalModel whose forward compares. Under FSDP it is the root of both forwards, so that both compute
    with the full tensors of a sharded model. The placeholder of its images is one of the first COMPARED_IDS ids."""

    def __init__(self, lm: PreTrainedModel, parts: Parts):
        self.num_ids = min(COMPARED_IDS, lm.config.get_text_config().vocab_size)
        if len(parts) > 2:
            lm.config.image_token_id = self.num_ids - 1
        super().__init__(lm, parts)

    @torch.no_grad()
    def forward(self, lengths: tuple[int, int]) -> ScoreDifferences:  # type: ignore[override]
        """lengths: of two rows to compare. (On accelerators FSDP2 can't call a forward without arguments.)"""
        lm = self.lm
        device = self.head().weight.device
        rows = [(torch.arange(n) * 7 % (self.num_ids - 2) + 1).to(device) for n in lengths]
        tokens, positions = torch.cat(rows), torch.cat([torch.arange(len(r), device=device) for r in rows])
        packed = attention.PackedAttention(self._padded([0, len(rows[0]), len(tokens)]), device)
        single = _RecordedAttention(self._padded([0, len(rows[0])]), device)
        ours = self._logprobs(tokens, positions, packed)
        alone = self._logprobs(rows[0], positions[: len(rows[0])], single)
        with eager_attention(lm, self.parts), nullcontext() if self.peers is None else self.peers.without_tp():
            theirs = torch.cat([self._softmax(lm(row[None]).logits[0]) for row in rows])
        if self.peers is not None:
            theirs = theirs.gather(1, tokens.roll(-1)[:, None])
        found = [(alone - theirs[: len(alone)]).abs().max(), (ours - theirs).abs().max()]
        images = self._with_image(rows[1]) if self.peers is None and self.inputs.family is not None else []
        found = [torch.stack(pair).max() for pair in zip(found, images, strict=True)] if images else found
        return ScoreDifferences(found[0], found[1], single.layers)

    def _with_image(self, text: torch.Tensor) -> list[torch.Tensor]:
        """The differences of a row of the text with an image in it, alone and packed before the text."""
        family, device, n = self.inputs.family, text.device, len(text)
        assert family is not None
        placeholders, media = self.inputs.smallest()
        row = _RowWithMedia({"image": media}, [("image", n, len(placeholders))])
        tokens = torch.cat([text, torch.from_numpy(placeholders).to(device), text])
        kwargs = {
            name: torch.from_numpy(array).to(device)
            for name, array in self.inputs.kwargs([Piece(row, 0, len(tokens))]).items()
        }
        own = [Piece(row, 0, len(tokens)), Piece(_RowWithMedia({}, []), 0, n)]
        types = {family.types: tokens.eq(self.num_ids - 1).long()[None]} if family.types else {}
        last = torch.arange(len(tokens) - n, len(tokens), device=device)
        with eager_attention(self.lm, self.parts):
            theirs = self._softmax(self.lm(tokens[None], **kwargs, **types, logits_to_keep=n).logits[0])
        ours = []
        for pieces in (own[:1], own):
            packed = torch.cat([tokens, text])[: sum(p.stop for p in pieces)]
            cu_seqlens = [0, *itertools.accumulate(p.stop for p in pieces)]
            context = attention.PackedAttention(cu_seqlens, device, mutual=self.inputs.mutual(pieces))
            positions = torch.from_numpy(self.inputs.positions(pieces)).to(device)
            hidden = self.hidden(packed, positions, context, **kwargs)
            ours.append(self.with_head(_of_all_ids, hidden.index_select(0, last)))
        return [(each - theirs).abs().max() for each in ours]

    def _softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.float() if self.masked is None else logits.float() + self.masked, dim=-1)

    def _logprobs(
        self, tokens: torch.Tensor, positions: torch.Tensor, context: attention.PackedAttention
    ) -> torch.Tensor:
        """Of all ids of the vocabulary, or of the next token where ranks share the vocabulary or the tokens."""
        peers = self.peers
        if peers is None:
            return self.with_head(_of_all_ids, self.hidden(tokens, positions, context))
        n, first = len(tokens), peers.first(len(tokens))
        own = torch.arange(n, device=tokens.device)[first:][: peers.chunk(n)]
        ones = torch.ones(len(own), device=tokens.device)
        scored, previous = (own + 1) % n, own - first
        logprobs, _ = super().forward(tokens, positions, context, scored, previous, ones, None, False, {})
        return peers.sum_chunks(logprobs.new_zeros(len(tokens)).index_copy(0, own, logprobs))[:, None]

    def _padded(self, cu_seqlens: list[int]) -> list[int]:
        return cu_seqlens if self.peers is None else self.peers.padded(cu_seqlens)


def _of_all_ids(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    return torch.log_softmax(head.logits(hidden), dim=-1)


@torch.no_grad()
def require_replay(model: CausalModel, path: str) -> None:
    """Check that routers compute with the experts that they are to select: with their own ones as without, and with
    others by scores that are not 0."""
    routing = require_routing(model.routing, path, "rollout.router_replay=false")
    device = model.head().weight.device
    tokens = torch.arange(11, device=device) * 5 % (model.vocab_size - 1) + 1
    outputs: list[tuple[torch.Tensor, ...]] = []
    hooks = [r.register_forward_hook(lambda _, args, out: outputs.append(out)) for r in routing.routers]

    def hidden(routes: torch.Tensor | None) -> torch.Tensor:
        outputs.clear()
        routing.begin(None, routes)
        context = attention.PackedAttention([0, len(tokens)], device)
        return model.hidden(tokens, torch.arange(len(tokens), device=device), context)

    before, routing.records = routing.records, True
    unchanged, own = hidden(None), routing.recorded()
    difference = (hidden(own) - unchanged).abs().max() / unchanged.abs().max()
    others = (own + 1) % outputs[0][routing.logits_at].shape[-1]
    hidden(others)
    is_replayed = torch.equal(routing.recorded(), others) and all(bool((out[1] != 0).all()) for out in outputs)
    routing.begin(None, None)
    routing.records = before
    for hook in hooks:
        hook.remove()
    if difference > 1e-2 or not is_replayed:
        raise ConfigError(
            f"rollout.router_replay is true, but the routers of {type(model.lm).__name__} can't be made to select the "
            f"experts that a sampler has selected: they do not choose by torch.topk of all experts' scores. Set it to "
            "false"
        )


def require_same(compared: ScoreDifferences, model: str, path: str, uncut: Sequence[str] | None) -> None:
    """model: its class. uncut: the layers that no plan of tensor parallelism cuts; None without it."""
    name, alone, packed = f"{model} of {path!r}", float(compared.alone), float(compared.packed)
    if math.isnan(alone) or math.isnan(packed):
        raise ConfigError(
            f"{name} computes logprobs that are not finite, although its values are: "
            "they are so large that its forward overflows. The run that wrote it may have diverged. Give another model"
        )
    if repeated := sorted({layer for layer in compared.layers if compared.layers.count(layer) > 1}):
        raise ConfigError(
            f"{name} computes attention {compared.layers.count(repeated[0])} times in layer {repeated[0]} for the same "
            "tokens, but a KV cache of meshrl has one key and value of each token in a layer. Choose another model"
        )
    if not alone <= TOLERANCE_NATS:
        of_tp = ""
        if uncut is not None:
            layers = f"; it does not cut {', '.join(uncut)}" if uncut else ""
            of_tp = "; or meshrl's plan of tensor parallelism for this family is wrong (then train.mesh.tp=1 is right"
            of_tp += f"{layers})"
        raise ConfigError(
            f"{name} gives a single row logprobs that differ by {alone:.2g} nats from Transformers' own forward "
            f"(allowed: {TOLERANCE_NATS:g}): its attention or its head computes something that meshrl does not, such "
            f"as attention to later tokens or a position bias{of_tp}. Choose another model"
        )
    if not packed <= TOLERANCE_NATS:
        raise ConfigError(
            f"{name} gives packed rows logprobs that differ by {packed:.2g} nats from Transformers' own forward "
            f"(allowed: {TOLERANCE_NATS:g}), but not a single row: its rows affect each other, or it counts positions "
            "by itself. Choose another model"
        )
