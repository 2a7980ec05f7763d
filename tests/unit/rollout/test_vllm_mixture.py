"""Mixtures of experts in the real vLLM, which loads the names of the model's files, fuses the experts in its own way
and, on a CPU, packs them for its kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import distance, layout_of, sync
from tiny_models import tiny_lm
from vllm_servers import MISSING, MODEL, client_of, serving

from meshrl.core.errors import SyncError

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(400)]
CONTEXT = list(range(5, 40))
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "head_dim": 32, "moe_intermediate_size": 32},
    "glm4_moe": {"head_dim": 32, "moe_intermediate_size": 32},
}
TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.slow)])
async def test_a_mixture_arrives_and_samples_what_the_trainer_computes(tmp_path: Path, family: str):
    """After two syncs: the second one packs weights that the first one has packed already."""
    models = [tiny_lm(family, seed=seed, **{**MODEL, **MIXTURES[family]}) for seed in range(3)]
    layout = layout_of(models[0])
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in layout.by_name
    with serving(models[0], tmp_path / "model") as server:
        engine = client_of(server)
        await engine.reconcile(layout)
        for version, lm in enumerate(models[1:]):
            ack = await sync(lm, engine, version)
            assert (ack.wire, ack.read_back, ack.num_tensors) == (True, True, len(layout.tensors))
            assert await distance(engine, lm, CONTEXT, "a", max_new_tokens=40) < 1e-4
            assert await distance(engine, models[0], CONTEXT, "a", max_new_tokens=40) > 0.1


async def test_experts_that_are_not_packed_for_the_kernel_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All their elements are there, but the kernel reads them from the wrong positions."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    old, new = (tiny_lm("qwen3_moe", seed=seed, **{**MODEL, **MIXTURES["qwen3_moe"]}) for seed in range(2))
    extension = ("--worker-extension-cls", "vllm_unpacked_experts.UnpackedExperts")
    with serving(old, tmp_path / "model", *extension) as server:
        engine = client_of(server)
        await engine.reconcile(layout_of(new))
        with pytest.raises(SyncError, match=r"24 of \d+ tensors differ(.|\n)*experts\.0\.gate_proj\.weight has digest"):
            await sync(new, engine, 0)
