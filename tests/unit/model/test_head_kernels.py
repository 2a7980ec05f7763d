"""Logprobs and entropies over tiles of the vocabulary, in Triton's interpreter, against torch's function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton_interpreter  # skips this file where the interpreter can't run
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.model import kernels, logprob
from meshrl.model.logprob import Head, token_logprobs

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.0},
}
SIZES = {  # tokens, hidden size, vocabulary: of tiles of 16 tokens, 32 columns, 16 of the hidden size, 64 of a program
    "odd sizes": (37, 40, 203),
    "complete tiles": (32, 32, 128),
    "one token": (1, 24, 65),
    "less than a tile": (3, 7, 5),
    "many blocks of tokens": (70, 16, 70),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small sizes have several tiles; and a chooser that takes the kernels on a CPU, too."""
    for name, value in {"BLOCK_N": 16, "BLOCK_V": 32, "BLOCK_D": 16, "SPLIT": 64, "GROUP": 2}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(logprob, "has_triton", lambda device: True)
    triton_interpreter.bf16_as_on_devices(monkeypatch)


def _inputs(size: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    n, d, v = size
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(n, d, generator=g).to(dtype),
        "weight": (torch.randn(v, d, generator=g) / math.sqrt(d / 4)).to(dtype),
        "bias": torch.randn(v, generator=g).to(dtype),
        "targets": torch.randint(v, (n,), generator=g),
        "temperature": torch.tensor([0.6, 1.0, 1.3, 0.0])[torch.randint(4, (n,), generator=g)],
    }


def _scored(x: dict[str, torch.Tensor], bias=False, scale=1.0, softcap=None, entropy=True, chunk=5):
    head = Head(x["weight"], x["bias"] if bias else None, scale, softcap)
    return token_logprobs(x["hidden"], head, x["targets"], x["temperature"], chunk_tokens=chunk, entropy=entropy)


def _results(x: dict[str, torch.Tensor], *, in_loss=("logp", "entropy"), **head: Any) -> list[torch.Tensor]:
    """Logprobs, entropies, and the gradients of a weighted sum of those in the loss in hidden, weight and bias."""
    leaves = {name: x[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    scored = _scored({**x, **leaves}, **head)
    mix = torch.linspace(-1, 1, len(x["hidden"])) + 0.1
    sum(mix @ each for name, each in zip(("logp", "entropy"), scored, strict=True) if name in in_loss).backward()
    return [each.detach() for each in scored] + [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def _require_equal(x: dict[str, torch.Tensor], **facts: Any) -> None:
    """To torch's function of the same numbers in fp32: values to a few roundings of fp32; gradients, of which the
    kernels round dL/dlogits to the operands' dtype, to one rounding of that dtype."""
    found = _results(x, **facts)
    wide = {name: each.float() if name in ("hidden", "weight", "bias") else each for name, each in x.items()}
    expected = _results(wide, **facts)
    assert len(found) == len(expected)
    for got, want in zip(found[:2], expected[:2], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-6, atol=4e-6)
    step = torch.finfo(x["hidden"].dtype).eps
    for got, want in zip(found[2:], expected[2:], strict=True):
        assert got.dtype == x["hidden"].dtype
        assert torch.linalg.norm(got.float() - want) <= step * torch.linalg.norm(want)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_values_and_gradients_equal_those_of_torch(head):
    """At T = 0.6, 1, 1.3 and 0 mixed in one call."""
    _require_equal(_inputs(SIZES["odd sizes"], torch.bfloat16), **head)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_any_number_of_tokens_and_columns_gives_the_same(size):
    _require_equal(_inputs(size, torch.float16, seed=1), **HEADS["all"])


@pytest.mark.parametrize("in_loss", ["logp", "entropy"])
def test_a_loss_of_one_of_both_results_has_its_gradient(in_loss):
    _require_equal(_inputs(SIZES["odd sizes"], torch.float16), in_loss=(in_loss,), **HEADS["bias"])


@pytest.mark.parametrize("chunk", [1, 1000])
def test_gradients_do_not_depend_on_how_many_logits_may_exist(chunk):
    """Columns are written in slices of one tile, or all at once."""
    _require_equal(_inputs(SIZES["odd sizes"], torch.float16), chunk=chunk, **HEADS["all"])


def test_slopes_have_a_limit_whatever_number_of_tokens_is_allowed(monkeypatch):
    """256 MiB for 16-bit numbers. The result is that of one slice."""
    assert kernels.SLOPES * 2 == 256 << 20
    tokens, dim, vocab = 48, 16, 256
    x = _inputs((tokens, dim, vocab), torch.bfloat16)
    for limit in (tokens * 64, tokens):
        monkeypatch.setattr(kernels, "SLOPES", limit)
        with _Shapes() as shapes:
            _results(x, chunk=1000)
        width = max(limit // tokens, kernels.BLOCK_V)
        assert (tokens, width) in shapes.seen and (tokens, 2 * width) not in shapes.seen
        _require_equal(x, chunk=1000, **HEADS["all"])


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_the_gradient_of_a_head_is_added_in_place(head):
    """To that of an earlier micro-batch: the sum is that of both to the bit."""
    x, grads = _inputs(SIZES["odd sizes"], torch.bfloat16), []
    weight = x["weight"].requires_grad_()
    start = torch.randn_like(weight)
    for first in (None, start.detach().clone()):
        weight.grad = first
        sum(each.sum() for each in _scored(x, **head)).backward()
        assert first is None or weight.grad is first
        grads.append(weight.grad)
    assert torch.equal(grads[1], start + grads[0])


def _entropies(steps: int, exact: bool) -> torch.Tensor:
    """Mean entropies in a training of fp32 (fp64) masters whose rounded copies are scored."""
    x, found = _inputs((16, 16, 400), torch.float32), []
    masters = [x[name].to(torch.float64 if exact else torch.float32) for name in ("hidden", "weight")]
    for _ in range(steps):
        hidden, weight = (m.bfloat16().to(m.dtype if exact else torch.bfloat16).requires_grad_() for m in masters)
        logp, entropy = _scored({**x, "hidden": hidden, "weight": weight, "temperature": torch.ones(16)}, chunk=1000)
        (0.004 * entropy.sum() - 0.004 * logp.sum()).backward()
        for master, copy in zip(masters, (hidden, weight), strict=True):
            master -= copy.grad
        found.append(entropy.detach().double().mean())
    return torch.stack(found)


def test_slices_do_not_drift_from_fp64_over_50_steps(monkeypatch):
    """A gradient of hidden states that is rounded before slices are summed is 3e-4 off by then."""
    monkeypatch.setattr(kernels, "SLOPES", 1)
    slices, exact = _entropies(50, False), _entropies(50, True)
    assert exact[-1] < 0.8 * exact[0]
    torch.testing.assert_close(slices, exact, rtol=2e-3, atol=0)
    monkeypatch.setattr(kernels, "SLOPES", 1 << 27)
    torch.testing.assert_close(slices, _entropies(50, False), rtol=5e-5, atol=0)


def test_a_frozen_head_gets_no_gradient_and_no_entropy_is_computed_unasked(monkeypatch):
    monkeypatch.delattr(torch, "mm")  # the product of the head's gradient
    x = _inputs(SIZES["odd sizes"], torch.bfloat16)
    x["hidden"].requires_grad_()
    logp, entropy = _scored(x, entropy=False)
    logp.sum().backward()
    assert entropy is None and x["weight"].grad is None and x["hidden"].grad.abs().sum() > 0
    assert torch.equal(logp, _scored(x)[0])


def test_a_token_has_the_same_result_whatever_the_others_are():
    x = _inputs(SIZES["many blocks of tokens"], torch.bfloat16)
    alone = {name: x[name][40:41] for name in ("hidden", "targets", "temperature")} | {"weight": x["weight"]}
    assert all(torch.equal(one, many[40:41]) for one, many in zip(_scored(alone), _scored(x), strict=True))


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_results_stay_in_range_and_keep_their_digits(size):
    """For distributions that are nearly uniform and nearly certain; the logits reach 3,000. Compared with fp64."""
    x = _inputs((20, 16, 100), torch.float16, seed=3)
    x["weight"] = (x["weight"] * size).half()
    logits = x["hidden"].double() @ x["weight"].double().T
    x["temperature"], x["targets"] = torch.ones(20), logits.argmax(-1)
    logp, entropy = _scored(x)
    logq = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logp.double(), logq.amax(-1), rtol=1e-4, atol=3e-4 if size > 1 else 1e-6)
    torch.testing.assert_close(entropy.double(), -(logq.exp() * logq).sum(-1), rtol=1e-3, atol=1e-6)
    assert (logp <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(100) + 1e-5).all()


def test_a_row_that_is_not_finite_has_no_finite_result_and_no_other_is_affected():
    x = _inputs(SIZES["odd sizes"], torch.bfloat16)
    x["hidden"][20, 3] = math.nan
    for each in _scored(x):
        assert (~torch.isfinite(each)).nonzero().flatten().tolist() == [20]


def test_no_tokens_give_no_logprobs_and_no_gradient():
    x = _inputs((0, 16, 70), torch.bfloat16)
    for each in _results(x, **HEADS["bias"])[3:]:
        assert torch.equal(each, torch.zeros_like(each))


def test_kernels_are_used_for_16_bit_operands_alone(monkeypatch):
    """fp32 products are matrix products of torch, which may use the settings that a user gave it."""

    def function(x: dict[str, torch.Tensor]) -> str:
        return _scored({**x, "hidden": x["hidden"].clone().requires_grad_()})[0].grad_fn.name()

    x = _inputs(SIZES["one token"], torch.bfloat16)
    assert function(x) == "TiledLogprobBackward"
    assert function({**x, "weight": x["weight"].float()}) == "_ChunkedLogprobBackward"
    assert function(_inputs(SIZES["one token"], torch.float32)) == "_ChunkedLogprobBackward"
    monkeypatch.undo()
    assert function(x) == "_ChunkedLogprobBackward"


class _Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations returned, without bytes: the interpreter copies memory as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.dtype != torch.uint8:
                self.seen.append(each.shape)
        return out

    def above(self, elements: int) -> set[tuple[int, ...]]:
        """The shapes of more elements."""
        return {tuple(shape) for shape in self.seen if math.prod(shape) > elements}


def test_logits_of_all_tokens_never_exist():
    """Forward has no tensor with logits at all, backward one of as many as are allowed."""
    tokens, vocab, dim, chunk = 96, 256, 16, 12
    x = _inputs((tokens, dim, vocab), torch.bfloat16)
    x["hidden"].requires_grad_()
    x["weight"].requires_grad_()
    with _Shapes() as shapes:
        logp, entropy = _scored(x, softcap=5.0, chunk=chunk)
        numbers = 3 * (vocab // kernels.SPLIT) * tokens
        assert shapes.above(numbers) == {(vocab, dim), (tokens, dim)}  # the interpreter's views of the operands
        (logp.sum() + entropy.sum()).backward()
    width = chunk * vocab // tokens
    slices = {(tokens, width), (width, tokens)}  # of dL/dlogits
    assert shapes.above(numbers) == {(vocab, dim), (tokens, dim)} | slices


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_the_log_of_the_sum_and_its_gradient_equal_those_of_torchs_function(size):
    """Ranks of tensor parallelism need it of their part of the vocabulary."""
    found = []
    for function in (logprob._ChunkedLogprob, kernels.TiledLogprob):
        x = _inputs(size, torch.bfloat16)
        hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_()
        temperature = torch.ones_like(x["temperature"])
        logp, _, lse = function.apply(hidden, weight, None, x["targets"], temperature, 1.0, None, 5, True)
        (logp.sum() + (lse * torch.arange(1, len(lse) + 1)).sum()).backward()
        found.append((lse.detach(), hidden.grad, weight.grad))
    for ours, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, want, atol=2e-2 * float(want.abs().max()), rtol=2e-2)
