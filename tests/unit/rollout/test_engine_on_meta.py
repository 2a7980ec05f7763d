"""What the embedded engine calls on an accelerator, without one: on meta tensors, whose numbers are all zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meta_device import META, DeviceCalls
from tiny_engines import ask
from tiny_models import tiny_qwen2

from meshrl.model.causal import CausalModel
from meshrl.model.fast_decoder import FastDecoder, fast_decoder
from meshrl.model.recipe import cast_parameters
from meshrl.rollout.embedded.engine import EmbeddedEngine

NUM_TOKENS = 12  # of the longer answers, after prompts of 118 to 120: they enter the second page of the KV cache


def _engine(num_layers: int, fast: bool) -> EmbeddedEngine:
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
    return engine


def _reads_by_step(num_layers: int, fast: bool) -> tuple[list[int], DeviceCalls]:
    """Groups of different prompts, whose rows join, grow into another page, and end."""
    engine = _engine(num_layers, fast)
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


@pytest.fixture(scope="module", params=[False, True], ids=["own forward", "fast decoder"])
def of_two_layers(request: pytest.FixtureRequest) -> tuple[list[int], DeviceCalls]:
    return _reads_by_step(2, request.param)


def test_a_step_of_decode_waits_for_the_device_once(of_two_layers: tuple[list[int], DeviceCalls]) -> None:
    """The read of the sampled tokens; one more for each row, layer or parameter of sampling would leave the device idle
    between kernels, and no error would show it."""
    reads, calls = of_two_layers
    assert len(reads) > NUM_TOKENS and set(reads) == {1}
    half = (torch.bfloat16, torch.bfloat16)
    assert {call[1:] for call in calls.named("aten.mm.dtype")} == {(half, torch.float32)}  # the head's


def _steady_step(num_layers: int, fast: bool, length: int) -> tuple[int, int, int]:
    """Reads, copies to the device, and launches of a step in which no row joins or leaves. length: of the first
    prompt."""
    engine = _engine(num_layers, fast)
    for i in range(4):
        engine.submit(ask(f"{i}", np.arange(length + 3 * i) % 60, temperature=1.0, max_new_tokens=6))
    with DeviceCalls() as calls:
        engine.step()  # the contexts
        engine.step()
        before = calls.counts
        engine.step()
    reads, uploads, launches = (after - b for after, b in zip(calls.counts, before, strict=True))
    return reads, uploads, launches


@pytest.mark.parametrize(("fast", "num_layers", "budget"), [(True, 1, 117), (True, 3, 227), (False, 3, 268)])
def test_a_step_of_decode_stays_within_its_budget(fast: bool, num_layers: int, budget: int) -> None:
    """One read, one copy to the device, and 55 launches for each layer of the fast decoder (69 for the model's own
    forward) where Triton is missing. A decode step takes as long as its launches, and waits for each pageable copy."""
    reads, uploads, launches = _steady_step(num_layers, fast, 20)
    assert reads == uploads == 1
    assert launches <= budget


def test_rows_of_two_pages_need_no_further_copy() -> None:
    reads, uploads, launches = _steady_step(3, True, 123)
    assert reads == uploads == 1
    assert launches <= 227


def test_a_step_of_decode_rounds_neither_attention_scores_nor_sums(
    of_two_layers: tuple[list[int], DeviceCalls],
) -> None:
    """Products with pages are in fp32, and so is the softmax; on a CPU they are because its pages are in fp32."""
    _, calls = of_two_layers
    half, wide = (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    batched = {call for call in calls.calls if call[0].startswith(("aten.bmm", "aten.baddbmm"))}
    rotary = ("aten.bmm.default", wide, torch.float32)  # frequencies times positions
    assert batched == {("aten.bmm.dtype", half, torch.float32), rotary}
    assert {call[1:] for call in calls.named("softmax")} == {((torch.float32,), torch.float32)}
