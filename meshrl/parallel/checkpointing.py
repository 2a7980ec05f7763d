"""Activation checkpointing: store only a block's input, and recompute its activations in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Iterable[torch.nn.Module]) -> None:
    """Call it before FSDP shards the blocks, so that FSDP's hooks are not part of what is recomputed.

    Transformers' own checkpointing needs train mode, in which some families compute at random (sampled experts, router
    jitter, skipped layers).
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
