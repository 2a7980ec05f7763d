"""The reference loop for the axis `ulysses`: bare_fsdp2.py, but each rank has a chunk of the tokens, and swaps them for
heads in attention."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare_fsdp2 import ScoringModel

from meshrl.model.attention import PackedAttention
from meshrl.model.logprob import Head, token_logprobs


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad)


class SplitHeads(PackedAttention):
    def attend(self, layer, q, k, v, spec):
        n = dist.get_world_size()
        q, k, v = (Swap.apply(x.unflatten(1, (n, -1)).transpose(0, 1)).flatten(0, 1) for x in (q, k, v))
        out = super().attend(layer, q, k, v, spec)
        return Swap.apply(out.unflatten(0, (n, -1))).transpose(0, 1).flatten(1, 2)


def padded(batch, size):
    """With tokens of a last row, so that their number is a multiple of size."""
    extra = -len(batch.tokens) % size
    tokens, positions = F.pad(batch.tokens, (0, extra)), F.pad(batch.position_ids, (0, extra))
    ends, parents = (F.pad(batch.cu_seqlens, (0, 1), value=len(tokens)), [*batch.parents, -1])
    return replace(batch, tokens=tokens, position_ids=positions, cu_seqlens=ends, parents=parents)


class ChunkedModel(ScoringModel):
    """Logprobs of the trained tokens whose previous tokens are in this rank's chunk."""

    def forward(self, batch, entropy):
        batch = padded(batch, dist.get_world_size())
        chunk = len(batch.tokens) // dist.get_world_size()
        first = chunk * dist.get_rank()
        own = slice(first, first + chunk)
        hidden = self.lm.model(
            input_ids=batch.tokens[None, own],
            position_ids=batch.position_ids[None, own],
            attention_mask=None,
            use_cache=False,
            attention_context=SplitHeads(batch.cu_seqlens.tolist(), batch.tokens.device, batch.parents),
        ).last_hidden_state[0]
        where = batch.mask.nonzero()[:, 0]
        where = where[batch.previous[where] // chunk == dist.get_rank()]
        previous, temperature = hidden[batch.previous[where] - first], batch.temperature[where]
        options = dict(chunk_tokens=self.chunk_tokens, entropy=entropy)
        return where, *token_logprobs(
            previous, Head(self.lm.lm_head.weight), batch.tokens[where], temperature, **options
        )
