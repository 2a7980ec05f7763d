"""Activation checkpointing: what blocks do not store, they compute again in the backward pass.

Transformers' own checkpointing needs train mode, in which some families compute at random (sampled experts, router
jitter, skipped layers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshrl.core.errors import ConfigError
from meshrl.parallel.compute_dtype import Named, replaced
from meshrl.plan.decisions import recomputed_every

_MLP = re.compile("mlp|feed_forward|moe")  # in the name of a block's child with matrices
# Operators whose results are stored: products, except those that begin with a bias, which are scores of attention and
# merged experts; and attention.
_STORED = re.compile(
    r"aten::(mm|addmm|bmm|_grouped_mm|_scaled_dot_product_\w+|_flash_attention_forward)|torch_attn::_varlen_attn"
)


def checkpoint_blocks(blocks: Iterable[torch.nn.Module], mode: bool | str) -> None:
    """mode: of train.activation_checkpointing. Call it before FSDP shards the blocks, so that FSDP's hooks are not part
    of what is recomputed.

    Raises: ConfigError for a block without the parts that the mode recomputes.
    """
    every = recomputed_every(mode)
    for number, block in enumerate(blocks):
        if mode == "submodule":
            for module in _recomputed(block):
                named = [(m, name) for m in module.modules() for name in m._parameters]
                module.forward = partial(_with_same_parameters, named, module.forward)
        elif mode == "selective":
            # Transformers adds biases of experts to their product in place, so this one can't be stored.
            is_biased = any("bias" in name and p.ndim > 1 for name, p in block.named_parameters())
            contexts = partial(create_selective_checkpoint_contexts, partial(_policy, is_biased))
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        elif every and number % every == 0:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _recomputed(block: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """MLP or experts of a block, and its norms outside of them."""
    mlps = [
        child
        for name, child in block.named_children()
        if _MLP.search(name) and any(p.ndim > 1 for p in child.parameters())
    ]
    if not mlps:
        children = ", ".join(name for name, _ in block.named_children())
        raise ConfigError(
            "train.activation_checkpointing is submodule, which recomputes norms and modules named mlp, feed_forward "
            f"or moe, but {type(block).__name__} has {children}. Use block or selective"
        )
    inside = {module for mlp in mlps for module in mlp.modules()}
    yield from mlps
    yield from (m for m in block.modules() if "norm" in type(m).__name__.lower() and m not in inside)


def _with_same_parameters(named: Named, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Checkpointed, with the parameters that the modules have now, such as copies in the compute dtype and cuts, which
    exist only in the forward of their block."""
    held: list[Any] = [module._parameters[name] for module, name in named]

    def again(*args: Any, **kwargs: Any) -> Any:
        with replaced(named, held):
            return forward(*args, **kwargs)

    return checkpoint(again, *args, use_reentrant=False, **kwargs)


def _policy(biased_experts: bool, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A repeated forward reads products by their order, so it must compute all that the first one did."""
    name = operator._schema.name
    is_stored = _STORED.fullmatch(name) and not (biased_experts and name in ("aten::_grouped_mm", "aten::bmm"))
    return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.PREFER_RECOMPUTE
