"""Buffers of a model in the real vLLM, which stores them in another dtype and has its own loader for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engines import ask, differences, layout_of, sync
from tiny_models import tiny_lm
from vllm_servers import MISSING, MODEL, client_of, serving

from meshrl.core.errors import SyncError
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.recipe import cast_parameters

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(400)]
CONTEXT = list(range(5, 40))


async def test_a_buffer_that_scales_each_layer_arrives_and_is_proven(tmp_path: Path):
    """Each layer of Gemma 4 is multiplied by a buffer, which is bf16 in vLLM and fp32 in the trainer: values that bf16
    can represent are loaded, others are refused by name."""
    old, new = (cast_parameters(tiny_lm("gemma4_text", seed=seed, **MODEL), torch.bfloat16) for seed in range(2))
    scalars = persistent_buffers(new)
    for scalar in scalars.values():
        scalar.fill_(0.625)
    with serving(old, tmp_path / "model") as server:
        engine = client_of(server)
        await engine.reconcile(layout_of(new))
        ack = await sync(new, engine, 0)
        assert ack.read_back is True and ack.num_tensors == len(layout_of(new).tensors)
        turn = await engine.generate(ask("a", CONTEXT, seed=1, ignore_eos=True))
        assert differences(new, turn).mean() < 0.05  # 0.02 by bf16 rounding; 0.19 with the old scalars
        scalars["model.layers.1.layer_scalar"].fill_(0.6)
        with pytest.raises(SyncError, match=r"model\.layers\.1\.layer_scalar .*stored as torch\.bfloat16"):
            await sync(new, engine, 1)
