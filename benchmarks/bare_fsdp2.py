"""The reference loop for the train engine: FSDP2, a packed batch, the same head and optimizer, and nothing else."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshrl.model.attention import PackedAttention
from meshrl.model.logprob import Head, token_logprobs
from meshrl.model.recipe import load_causal_lm


class ScoringModel(torch.nn.Module):
    """Tokens in, logprobs of trained tokens out: the head's full weight exists only inside the root's forward."""

    def __init__(self, lm, chunk_tokens):
        super().__init__()
        self.lm, self.chunk_tokens, self.vocabulary = lm, chunk_tokens, None

    def forward(self, batch, entropy):
        where = batch.mask.nonzero()[:, 0]
        hidden = self.lm.model(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            attention_context=PackedAttention(batch.cu_seqlens.tolist(), batch.tokens.device, batch.parents),
        ).last_hidden_state[0]
        return where, *token_logprobs(
            hidden[batch.previous[where]],
            Head(self.lm.lm_head.weight),
            batch.tokens[where],
            batch.temperature[where],
            chunk_tokens=self.chunk_tokens,
            entropy=entropy,
            vocabulary=self.vocabulary,
        )


class BareLoop:
    """`step(batches)` computes the gradients of all micro-batches, clips, and steps AdamW."""

    def __init__(self, folder, compute_dtype, lr, chunk_tokens, model_class=ScoringModel):
        lm = load_causal_lm(folder).train()
        self.model = model_class(lm, chunk_tokens)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in lm.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)

    def step(self, batches, entropy=True):
        for batch in batches:
            where, logp, _ = self.model(batch, entropy)
            loss = -((logp - logp.detach()).exp() * batch.advantages[where] * batch.loss_weight[where]).sum()
            (loss * dist.get_world_size()).backward()  # FSDP2 averages
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
