"""CausalModel: the interface of trainer and sampler to a Transformers causal LM: hidden states, logits, logprobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from meshrl.config.train import MESH_FOR_IMAGES
from meshrl.core.errors import ConfigError
from meshrl.model.attention import ONLY_CACHE, AttentionContext, ContextCache
from meshrl.model.inputs import ModelInputs
from meshrl.model.limits import HEAD_SCALES, head_scale
from meshrl.model.logprob import Head, Vocabulary, token_logprobs
from meshrl.model.parts import TEXT, Parts, blocks_of, parts_of
from meshrl.model.routing import Routing
from meshrl.model.state_layers import cache_argument, use_state_layers
from meshrl.model.ulysses import UlyssesAttention
from meshrl.parallel.fsdp import local_shard, run_within
from meshrl.parallel.mesh import Peers
from meshrl.plan.sizes import merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

MASKED = -1e30  # added to the logits of placeholders; -inf would give NaN in an entropy


class CausalModel(torch.nn.Module):
    """Wraps a Transformers causal LM (`self.lm`). The trainer calls forward, the sampler calls hidden and head.

    Under FSDP this module is the root: what belongs to no other group (`fsdp_groups`) is its own, such as the final
    norm and a tied embedding, so inside forward it is the full tensor.

    peers: the ranks that compute the same rows with this one; vocab_start: the first id of its part of the vocabulary.
    inputs: what it needs of rows besides ids. masked [V]: added to the logits, so that no placeholder of an image is
    sampled or trained; None = none has one.
    """

    peers: Peers | None = None
    vocab_start: int = 0
    compute_dtype: torch.dtype | None = None  # None = that of the parameters
    masked: torch.Tensor | None

    def __init__(self, lm: PreTrainedModel, parts: Parts | None = None):
        """parts: of a model of the same class and config, if they are known."""
        super().__init__()
        self.lm: PreTrainedModel = lm
        self.parts = parts or parts_of(lm)
        text = lm.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.replays_routing: bool = getattr(lm, "replays_routing", False)  # takes routed_experts int16[T, L, K]
        self.has_states = use_state_layers(lm)
        takes_cache = text.model_type in ONLY_CACHE or self.has_states
        self._cache_argument = cache_argument(signature(lm.base_model.forward).parameters) if takes_cache else None
        self.inputs = ModelInputs(lm.config)
        read = unwrap(type(lm).forward).__code__.co_names  # some classes with a tower ignore keys of the text's config
        has_tower = self.inputs.family is not None
        self._scale = 1.0 if has_tower and not HEAD_SCALES.keys() & set(read) else head_scale(text)
        softcap = getattr(text, "final_logit_softcapping", None)
        self._softcap = None if has_tower and "final_logit_softcapping" not in read else softcap
        masked = torch.zeros(self.vocab_size)
        masked[self.inputs.masked] = MASKED
        self.register_buffer("masked", masked if self.inputs.masked else None, persistent=False)

    @cached_property
    def routing(self) -> Routing | None:
        """The routers of a mixture of experts."""
        return Routing.of(self.lm, self.lm.get_submodule(self.parts[TEXT].module))

    @property
    def layers(self) -> torch.nn.ModuleList:
        """The blocks of the language model."""
        return blocks_of(self.lm, self.parts[TEXT])

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The blocks of all parts."""
        return [block for part in self.parts.values() for block in blocks_of(self.lm, part)]

    def fsdp_groups(self, limit: int, itemsize: int) -> list[list[torch.nn.Module]]:
        """Modules that FSDP2 gathers together: blocks of the language model, next to each other, of at most `limit`
        bytes with numbers of itemsize bytes, and a larger one alone; embedding and head, if they are larger and not
        tied; each block of a tower, because FSDP2 gathers a group for the backward pass of its last block, and LLaVA
        does not use the output of its tower's."""

        def size(module: torch.nn.Module) -> int:
            return itemsize * sum(local_shard(p).numel() for p in module.parameters())

        groups, lm = list[list[torch.nn.Module]](), self.lm
        for name, part in self.parts.items():
            blocks = list(blocks_of(lm, part))
            sizes, most = [size(block) for block in blocks], limit if name == TEXT else 0
            groups += [[blocks[i] for i in own] for own in merged(sizes, most)]
        ends: list[Any] = [lm.get_input_embeddings(), lm.get_output_embeddings()]
        if ends[0].weight is ends[1].weight:
            return groups
        embedding, head = ([[end]] if size(end) > limit else [] for end in ends)
        return embedding + groups + head

    def with_head(self, function: Callable[[torch.Tensor, Head], T], hidden: torch.Tensor) -> T:
        """function(hidden, head), with the gathered parameters of the head."""
        return run_within(self.lm.get_output_embeddings(), lambda h: function(h, self.head()), hidden)

    def head(self) -> Head:
        """The output head, with the current parameters; under tensor parallelism, this rank's part of it."""
        out = self.lm.get_output_embeddings()
        weight, bias = out.weight, getattr(out, "bias", None)
        if self.peers is not None and self.peers.tp is not None:
            weight, *rest = self.peers.tp.local([(out, "weight")] + [(out, "bias")] * (bias is not None))
            bias = rest[0] if rest else None
        if self.masked is not None:
            masked = self.masked[self.vocab_start :][: len(weight)]
            bias = masked if bias is None else bias + masked
        return Head(weight, bias, self._scale, self._softcap)

    def hidden(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, context: AttentionContext, **model_kwargs: Any
    ) -> torch.Tensor:
        """tokens int64[T], position_ids int64[T] or [3, T] -> final hidden states [T, D], or those of this rank's
        chunk."""
        peers = self.peers
        if peers is not None:
            if self.inputs.family is not None and model_kwargs:
                raise ConfigError(MESH_FOR_IMAGES)
            tokens, position_ids = peers.own_tokens(tokens), peers.own_tokens(position_ids)
            if peers.ulysses is not None:
                context = UlyssesAttention(context, peers.ulysses)
        embedding: Any = self.lm.get_input_embeddings()
        cache, dtype = self._cache_argument, self.compute_dtype or embedding.weight.dtype
        passed = {"attention_context": context} if cache is None else {cache: ContextCache(context)}
        out = self.lm.base_model(
            input_ids=tokens[None],
            position_ids=position_ids[None] if position_ids.dim() == 1 else position_ids[:, None],
            attention_mask=None,
            use_cache=False,
            **passed,
            **{name: x.to(dtype) if x.is_floating_point() else x for name, x in model_kwargs.items()},
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if peers is None else peers.gather_tp(hidden)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        context: AttentionContext,
        scored: torch.Tensor,
        previous: torch.Tensor,
        temperature: torch.Tensor,
        chunk_tokens: int | None,
        entropy: bool,
        model_kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logprobs (and entropies) of the tokens at positions `scored` int64[N], each computed from the hidden state at
        the position in `previous` int64[N], counted in this rank's chunk; temperature [N]. Returns float [N]."""
        h = self.hidden(tokens, position_ids, context, **model_kwargs)
        tp = None if self.peers is None else self.peers.tp

        def logprobs(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
            return token_logprobs(
                hidden,
                head,
                tokens.index_select(0, scored),
                temperature,
                chunk_tokens=chunk_tokens,
                entropy=entropy,
                vocabulary=None if tp is None else Vocabulary(self.vocab_start, tp.axis),
            )

        return self.with_head(logprobs, h.index_select(0, previous))
