"""What the embedded engine calls on an accelerator, without one: on meta tensors, whose numbers are all zeros."""

from __future__ import annotations

import numpy as np
import torch
from meta_device import META, DeviceCalls
from tiny_engines import ask
from tiny_models import tiny_qwen2

from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import FastDecoder, fast_decoder
from meshrl.model.recipe import cast_parameters
from meshrl.rollout.embedded.engine import EmbeddedEngine

NUM_TOKENS = 16  # of the longer answers, after prompts of 118 to 120: they enter the second tile of the KV cache


def _reads_by_step(num_layers: int, fast: bool) -> tuple[list[int], DeviceCalls]:
    """Groups of different prompts, whose rows join, grow into another tile, end, and move."""
    lm = tiny_qwen2(hidden_size=64, num_hidden_layers=num_layers, max_position_embeddings=256)
    model = CausalModel(lm.eval().requires_grad_(False))
    layers = fast_decoder(model).layers
    cast_parameters(model, torch.bfloat16).to(META)
    decoder = FastDecoder(model.lm.base_model, [layer.spec for layer in layers]) if fast else None
    engine = EmbeddedEngine(
        model,
        fast=decoder,
        stop_token_ids=(),
        max_running=4,
        max_context_tokens=256,
        engine_id="meta",
        device=META,
    )
    engine.trust_loaded_weights()
    for i in range(6):
        prompt, answer = np.arange(118 + i // 2) % 60, NUM_TOKENS if i % 2 else 4 + i
        engine.submit(ask(f"{i}", prompt, temperature=float(i % 3 > 0), max_new_tokens=answer))
    reads = []
    with DeviceCalls() as calls:
        while engine.has_work:
            before = calls.num_reads
            engine.step()
            reads.append(calls.num_reads - before)
    return reads, calls


def test_a_step_of_decode_waits_for_the_device_once() -> None:
    """The read of the sampled tokens; one more for each row, layer or parameter of sampling would leave the device idle
    between kernels, and no error would show it."""
    for num_layers in (1, 3):
        for fast in (False, True):
            reads, calls = _reads_by_step(num_layers, fast)
            assert len(reads) > NUM_TOKENS and set(reads) == {1}
            half = (torch.bfloat16, torch.bfloat16)
            assert {call[1:] for call in calls.named("aten.mm.dtype")} == {(half, torch.float32)}  # the head's


def test_a_step_of_decode_rounds_neither_attention_scores_nor_sums() -> None:
    """Products with tiles are in fp32, and so is the softmax; on a CPU they are because its tiles are in fp32."""
    for fast in (False, True):
        _, calls = _reads_by_step(2, fast)
        half = (torch.bfloat16, torch.bfloat16)
        batched = [call for call in calls.calls if call[0].startswith(("aten.bmm", "aten.baddbmm"))]
        assert set(batched) == {("aten.bmm.dtype", half, torch.float32)}
        assert {call[1:] for call in calls.named("softmax")} == {((torch.float32,), torch.float32)}
