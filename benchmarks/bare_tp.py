"""The reference loop for the axis `tp`, in fp32: each rank has a part of every matrix; between attention and MLP it has
a slice of the tokens. With FSDP2 around it, or of plain tensors, as the engine."""

import torch
import torch.distributed as dist
from bare_fsdp2 import ScoringModel
from bare_ulysses import padded
from torch.distributed.fsdp import fully_shard

from meshrl.model.logprob import Vocabulary
from meshrl.model.recipe import load_causal_lm
from meshrl.parallel.exchange import Axis


def gather(x):
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scatter(x):
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x[0])[None]

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad[0])[None], None, None


def all_tokens(x):
    return Exchange.apply(x, gather, scatter)


def own_tokens(parts):
    return Exchange.apply(parts, scatter, gather)


class BareTP:
    def __init__(self, folder, lr, chunk_tokens, dp_mesh=None):
        lm, self.rank, self.size = load_causal_lm(folder).train(), dist.get_rank(), dist.get_world_size()
        for block in lm.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                self.cut(layer, 0)
            self.cut(attention.o_proj, 1)
            self.cut(mlp.down_proj, 1)
            attention.forward = lambda hidden_states, forward=attention.forward, **kwargs: (
                own_tokens(forward(all_tokens(hidden_states), **kwargs)[0]),
                None,
            )
            mlp.forward = lambda x, forward=mlp.forward: own_tokens(forward(all_tokens(x)))
        embedding, final = lm.model.embed_tokens, lm.model.norm
        self.cut(embedding, 0)
        lm.lm_head.weight, words = embedding.weight, len(embedding.weight)
        first = words * self.rank

        def embed(tokens):
            inside = (tokens >= first) & (tokens < first + words)
            return own_tokens(
                torch.nn.functional.embedding((tokens - first) * inside, embedding.weight) * inside[..., None]
            )

        embedding.forward, final.forward = embed, lambda x, forward=final.forward: all_tokens(forward(x))
        self.model = ScoringModel(lm, chunk_tokens)
        self.model.vocabulary = Vocabulary(first, Axis(self.size, self.rank, dist.group.WORLD))
        if dp_mesh is not None:
            for block in lm.model.layers:
                fully_shard(block, mesh=dp_mesh)
            fully_shard(self.model, mesh=dp_mesh, reshard_after_forward=False)
        self.norms = [p for name, p in lm.named_parameters() if "norm" in name]
        self.parts = [p for name, p in lm.named_parameters() if "norm" not in name]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)

    def cut(self, layer, dim):
        for name, p in layer._parameters.items():
            if p is not None and p.ndim > dim:
                layer._parameters[name] = torch.nn.Parameter(p.detach().chunk(self.size, dim)[self.rank].clone())

    def step(self, batches, entropy=True):
        for batch in batches:
            where, logp, _ = self.model(padded(batch, self.size), entropy)
            (-(logp - logp.detach()).exp() * batch.advantages[where] * batch.loss_weight[where]).sum().backward()
        norms, parts = ([getattr(p.grad, "_local_tensor", p.grad) for p in group] for group in (self.norms, self.parts))
        of_norms = torch.cat(norms)
        dist.all_reduce(of_norms)
        torch._foreach_copy_(norms, of_norms.split([len(grad) for grad in norms]))
        squares = torch.nn.utils.get_total_norm(parts).square()
        dist.all_reduce(squares)
        norm = (squares + of_norms.square().sum()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()
