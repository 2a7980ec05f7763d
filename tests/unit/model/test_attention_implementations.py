"""Each model.attn_implementation computes what auto computes, by its own kernel, and leaks nothing between rows.

flash needs a GPU: test_varlen_layout.py replaces its kernel by the definition.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_lm
from tiny_packs import answers_to_one_prompt, score_pack
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.core.errors import ConfigError
from meshrl.core.types import Sample
from meshrl.model.attention import KERNELS, NAMES, AttentionSpec, PackedAttention, attention_text
from meshrl.model.causal import CausalModel
from meshrl.train.packing import require_independent_rows

CPU = torch.device("cpu")
OWN = ["sdpa", "eager"]
PACKS = {
    "rows": ([0, 5, 5, 6, 70, 81], None),
    "shared": ([0, 9, 10, 10, 22, 25, 40, 43], [-1, 0, 0, 0, -1, 4, 4]),  # prompts of 9 and 3 tokens; an empty answer
}
SPECS = [(None, None), (4, None), (None, 2.0), (4, 2.0)]  # window, softcap


def _attended(name: str, pack_name: str, window: int | None, softcap: float | None) -> list[torch.Tensor]:
    """The result and the gradients of q, k and v, for four query heads and two key heads."""
    cu, parents = PACKS[pack_name]
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(cu[-1], h, 8, generator=g).requires_grad_() for h in (4, 2, 2)]
    packed = PackedAttention(cu, CPU, parents)
    out = packed.attend(0, *qkv, AttentionSpec(0.3, window, softcap, name))
    kernel, problem = packed.used[0]
    assert kernel == ("padded" if name == "auto" or problem else name)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in qkv)]


@pytest.mark.parametrize("pack_name", PACKS)
@pytest.mark.parametrize("name", OWN)
def test_each_implementation_equals_auto_in_values_and_gradients(name, pack_name):
    for window, softcap in SPECS:
        got, want = (_attended(each, pack_name, window, softcap) for each in (name, "auto"))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.fused, self.softmax = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.fused += "scaled_dot_product" in str(func)
        self.softmax += "softmax" in str(func)
        return func(*args, **(kwargs or {}))


def test_sdpa_and_eager_run_the_kernels_of_their_names():
    """Short rows are computed by matrix products in auto only."""
    found = {}
    for name in ("auto", "sdpa", "eager"):
        q = torch.ones(6, 2, 8)
        with _Operations() as operations, torch.no_grad():
            PackedAttention([0, 6], CPU).attend(0, q, q, q, AttentionSpec(0.3, implementation=name))
        found[name] = operations.fused, operations.softmax
    assert found == {"auto": (0, 1), "sdpa": (1, 0), "eager": (0, 1)}


@pytest.mark.parametrize("name", ["auto", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_sdpa_gets_no_bias_of_another_dtype_than_the_queries(monkeypatch, dtype, name):
    """The kernels of a GPU refuse it. ALiBi in bf16 would be rounded, so that matrix products compute it."""
    dtypes, sdpa = [], F.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask, **more):
        dtypes.append(attn_mask.dtype)
        return sdpa(q, k, v, attn_mask=attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, 2, 8, generator=g).to(dtype) for _ in range(3))
    for sinks, slopes in (
        (q[0, :, 0], None),
        (None, torch.tensor([0.5, 0.01])),
        (q[0, :, 0], torch.tensor([0.5, 0.01])),
    ):
        spec = AttentionSpec(0.3, None, None, name, sinks, slopes)
        got = PackedAttention([0, 300], CPU).attend(0, q, k, v, spec)
        want = PackedAttention([0, 300], CPU).attend(
            0, q.double(), k.double(), v.double(), replace(spec, implementation="eager")
        )
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert dtypes == [dtype] * (1 if dtype == torch.bfloat16 else 3)


def _model(family: str, name: str) -> CausalModel:
    lm = tiny_lm(family)
    lm.set_attn_implementation(NAMES[name])
    return CausalModel(lm)


def _group() -> list[Sample]:
    return answers_to_one_prompt(3, 9, [5, 1, 30, 5])


def _scores(model: CausalModel, samples: list[Sample]) -> list[torch.Tensor]:
    logprobs, context = score_pack(model, samples)
    assert len(context.used) == len(model.layers)
    return logprobs


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2"])
@pytest.mark.parametrize("name", OWN)
def test_a_model_scores_and_learns_with_each_implementation_as_with_auto(name, family):
    """Grouped heads, windows that end in a shared prompt, and a softcap."""
    found = []
    for each in (name, "auto"):
        model, samples = _model(family, each), _group()
        logprobs = _scores(model, samples)
        sum(x.square().sum() for x in logprobs).backward()
        found.append([*logprobs, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, other.detach().abs().max().item()))


def _probe(name: str) -> None:
    model = _model("qwen2", name)

    def score(samples: list[Sample]) -> dict[int, np.ndarray]:
        with torch.no_grad():
            return {i: logprobs.numpy() for i, logprobs in enumerate(_scores(model, samples))}

    require_independent_rows("tiny", 64, score)


@pytest.mark.parametrize("name", [*OWN, "flash"])
def test_the_leak_probe_passes_with_each_implementation_and_sees_a_leak(name, monkeypatch):
    _probe(name)
    start = PackedAttention.__init__
    monkeypatch.setattr(PackedAttention, "__init__", lambda self, cu, *rest: start(self, [0, cu[-1]], CPU))
    with pytest.raises(ConfigError, match="affect each other"):
        _probe(name)


@pytest.mark.parametrize("name", OWN)
def test_changing_one_answer_changes_no_bit_of_the_others(name):
    model, samples = _model("gemma2", name), _group()
    with torch.no_grad():
        before = _scores(model, samples)
        samples[2].tokens[9:] = (samples[2].tokens[9:] + 7) % 64
        after = _scores(model, samples)
    assert [*map(torch.equal, before, after)] == [True, True, False, True]


def test_the_report_names_what_layers_use_and_why():
    used = {0: ("sdpa", ""), 1: ("padded", "SDPA computes no softcap"), 2: ("sdpa", "")}
    text = attention_text("sdpa", used)
    assert text.startswith("attention sdpa: SDPA over padded rows in 2 of 3 layers; ")
    assert text.endswith("in 1 of 3 layers, because SDPA computes no softcap")
    assert all(attention_text("auto", {0: (kernel, "")}) for kernel in KERNELS)
