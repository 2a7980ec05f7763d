"""Buffers of a model in the real vLLM, which stores them in another dtype and has its own loader for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_engines import ask, layout_of, plain, sync
from tiny_models import tiny_lm
from vllm_servers import MISSING, MODEL, client_of, serving

from meshrl.core.errors import SyncError
from meshrl.model.hub_names import persistent_buffers
from meshrl.model.recipe import cast_parameters

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(400)]
CONTEXT = list(range(5, 40))


def test_a_buffer_that_scales_each_layer_arrives_and_is_proven(tmp_path: Path):
    """Each layer of Gemma 4 is multiplied by a buffer, which is bf16 in vLLM and fp32 in the trainer: values that bf16
    can represent are loaded, others are refused by name."""
    old, new = (cast_parameters(tiny_lm("gemma4_text", seed=seed, **MODEL), torch.bfloat16) for seed in range(2))
    scalars = persistent_buffers(new)
    for scalar in scalars.values():
        scalar.fill_(0.625)

    async def main() -> None:
        engine = client_of(server)
        await engine.reconcile(layout_of(new))
        ack = await sync(new, engine, 0)
        assert ack.read_back is True and ack.num_tensors == len(layout_of(new).tensors)
        turn = await engine.generate(ask("a", CONTEXT, seed=1, ignore_eos=True))
        ids = torch.as_tensor([*CONTEXT, *turn.output_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(new)(input_ids=ids[None]).logits[0].float(), -1)
        expected = logprobs[:-1].gather(1, ids[1:, None])[len(CONTEXT) - 1 :, 0].numpy()
        assert np.abs(turn.logprobs - expected).mean() < 0.05  # 0.02 by bf16 rounding; 0.19 with the old scalars
        scalars["model.layers.1.layer_scalar"].fill_(0.6)
        with pytest.raises(SyncError, match=r"model\.layers\.1\.layer_scalar .*stored as torch\.bfloat16"):
            await sync(new, engine, 1)

    with serving(old, tmp_path / "model") as server:
        asyncio.run(asyncio.wait_for(main(), 200))
