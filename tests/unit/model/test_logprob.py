"""Chunked logprobs and entropies against a dense fp64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from live_storages import LiveStorages
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.model import logprob
from meshrl.model.logprob import Head, token_logprobs

N, D, V = 23, 12, 37
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.0},
}


@pytest.fixture(autouse=True, params=[False, True], ids=["recomputed", "saved"])
def both_ways(request, monkeypatch):
    """Chunks of logits that the backward pass recomputes, and a single chunk, which is saved; worked on in blocks."""
    monkeypatch.setattr(logprob, "BLOCK_LOGITS", 4 * V)

    def in_one_chunk(hidden, *args, chunk_tokens=None, **kwargs):
        chunk = N if len(hidden) == N else chunk_tokens
        return logprob.token_logprobs(hidden, *args, chunk_tokens=chunk, **kwargs)

    if request.param:
        monkeypatch.setitem(globals(), "token_logprobs", in_one_chunk)


def _inputs(dtype: torch.dtype, seed: int = 0, vocab: int = V) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype),
        "weight": torch.randn(vocab, D, generator=g, dtype=torch.float64).to(dtype),
        "bias": torch.randn(vocab, generator=g, dtype=torch.float64).to(dtype),
        "targets": torch.randint(vocab, (N,), generator=g),
        "temperature": torch.tensor([0.6, 1.0, 1.3])[torch.randint(3, (N,), generator=g)],
    }


def _dense(x: dict[str, torch.Tensor], bias=False, scale=1.0, softcap=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in fp64, with all logits at once."""
    z = x["hidden"].double() @ x["weight"].double().T
    z = z * scale if softcap is None else softcap * torch.tanh(z * scale / softcap)
    z = z + x["bias"].double() if bias else z
    logq = torch.log_softmax(z / x["temperature"].double()[:, None], dim=-1)
    return logq[torch.arange(N), x["targets"]], -(logq.exp() * logq).sum(-1)


def _chunked(x: dict[str, torch.Tensor], chunk: int, bias=False, scale=1.0, softcap=None):
    head = Head(x["weight"], x["bias"] if bias else None, scale, softcap)
    return token_logprobs(x["hidden"], head, x["targets"], x["temperature"], chunk_tokens=chunk, entropy=True)


def _grads(x: dict[str, torch.Tensor], score: Any) -> list[torch.Tensor]:
    """Gradients of a weighted sum of logprobs and entropies, in hidden, weight and bias."""
    leaves = {name: x[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    logp, ent = score({**x, **leaves})
    mix = torch.linspace(-1, 1, N, dtype=torch.float64)
    (mix @ logp.double() + mix.flip(0) @ ent.double()).backward()
    return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_values_and_gradients_equal_the_dense_definition(head, chunk, dtype, tolerance):
    """At T = 0.6, 1 and 1.3 mixed in one call, for every chunk size."""
    x = _inputs(dtype)
    for got, want in zip(_chunked(x, chunk, **head), _dense(x, **head), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    exact = _grads({k: v.double() if v.is_floating_point() else v for k, v in x.items()}, lambda y: _dense(y, **head))
    grads = _grads(x, lambda y: _chunked(y, chunk, **head))
    assert len(grads) == len(exact)
    for got, want in zip(grads, exact, strict=True):
        assert torch.linalg.norm(got.double() - want) < 10 * tolerance * torch.linalg.norm(want)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_temperature_divides_the_logits_and_greedy_scores_as_one(temperature):
    """The sampler's distribution; temperature 0 (greedy) gives the logprobs of temperature 1."""
    x = _inputs(torch.float32)
    x["temperature"] = torch.full((N,), temperature)
    got, _ = _chunked(x, 8)
    logits = x["hidden"].double() @ x["weight"].double().T
    want = torch.log_softmax(logits / temperature, -1)[torch.arange(N), x["targets"]]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    greedy, _ = _chunked({**x, "temperature": torch.zeros(N)}, 8)
    one, _ = _chunked({**x, "temperature": torch.ones(N)}, 8)
    assert torch.equal(greedy, one)
    assert (temperature == 1.0) == torch.equal(one, got)


def test_bf16_models_are_scored_in_fp32():
    """Neither logits nor softmax are rounded to bf16; the reference computes with the same bf16 weights in fp64."""
    x = _inputs(torch.bfloat16, vocab=512)
    x["weight"] = x["weight"] * 2  # logits of size 7, whose bf16 neighbours are 0.03 apart
    logp, ent = _chunked(x, 8, bias=True)
    assert logp.dtype == ent.dtype == torch.float32
    want_logp, want_ent = _dense(x, bias=True)
    torch.testing.assert_close(logp.double(), want_logp, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ent.double(), want_ent, rtol=1e-5, atol=2e-5)


def test_bf16_gradients_are_right_to_bf16():
    x = _inputs(torch.bfloat16)
    exact = _grads({k: v.double() if v.is_floating_point() else v for k, v in x.items()}, lambda y: _dense(y, True))
    for got, want in zip(_grads(x, lambda y: _chunked(y, 8, True)), exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.linalg.norm(got.double() - want) < 1e-2 * torch.linalg.norm(want)


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_logprobs_are_never_above_zero_and_entropies_stay_in_range(size):
    """Also if rounding alone would exceed the range, for near-uniform and near-certain distributions."""
    x = _inputs(torch.float32, seed=3)
    x["weight"] = x["weight"] * size
    logits = x["hidden"] @ x["weight"].T
    x["targets"] = logits.argmax(-1)
    logp, ent = _chunked(x, 8)
    assert torch.isfinite(logp).all() and (logp <= 0).all()
    assert (ent >= 0).all() and (ent <= math.log(V) + 1e-5).all()


def test_entropy_is_computed_only_on_request():
    x = _inputs(torch.float32)
    logp, ent = token_logprobs(x["hidden"], Head(x["weight"]), x["targets"], x["temperature"])
    assert ent is None
    assert torch.equal(logp, _chunked(x, 2048)[0])


def test_no_tokens_give_no_logprobs_and_no_gradient():
    """A rank may hold nothing but masked tokens."""
    hidden = torch.zeros(0, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    logp, ent = token_logprobs(
        hidden, Head(weight), torch.zeros(0, dtype=torch.int64), torch.zeros(0), chunk_tokens=4, entropy=True
    )
    (logp.sum() + ent.sum()).backward()
    assert logp.shape == ent.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_of_all_tokens_never_exist(dtype, softcap):
    """No tensor in forward or backward is larger than one chunk of logits or the head's gradient."""
    tokens, vocab, dim, chunk = 128, 500, 16, 16
    hidden = torch.randn(tokens, dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    with _Largest() as largest:
        logp, ent = token_logprobs(
            hidden,
            Head(weight, softcap=softcap),
            torch.randint(vocab, (tokens,)),
            torch.ones(tokens),
            chunk_tokens=chunk,
            entropy=True,
        )
        (logp.sum() + ent.sum()).backward()
    assert chunk * vocab <= largest.elements < 2 * chunk * vocab < tokens * vocab


class _Copies(TorchDispatchMode):
    """How many results of operations have memory of their own for this many elements or more."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.numel() >= self.elements:
            self.count += out.untyped_storage()._cdata not in given
        return out


@pytest.mark.parametrize(
    ("dtype", "copies_of_a_chunk"), [(torch.float32, 1), (torch.bfloat16, 2)], ids=["fp32", "bf16"]
)
def test_how_many_copies_of_a_chunk_a_cpu_needs(dtype, copies_of_a_chunk):
    """Logits, which their gradient overwrites, and a copy if the weight has another dtype; all between are of a
    block."""
    tokens, vocab, dim = 64, 1000, 16
    hidden, weight = (torch.randn(n, dim).to(dtype).requires_grad_() for n in (tokens, vocab))
    with _Copies(tokens * vocab) as copies:
        targets, temperature = torch.randint(vocab, (tokens,)), torch.full((tokens,), 0.7)
        logp, ent = logprob.token_logprobs(hidden, Head(weight), targets, temperature, entropy=True)
        (logp.sum() + ent.sum()).backward()
    assert copies.count == copies_of_a_chunk


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 1.5)], ids=["fp32", "bf16"])
def test_fewer_tokens_at_one_time_need_less_memory(monkeypatch, dtype, copies):
    """The memory is that of one chunk's logits (in bf16 also of a cast copy, and of the weight in fp32), and for a
    trained head of one fp32 gradient. Counted in rows of the vocabulary's size."""
    tokens, vocab, dim, block = 128, 1000, 64, 4
    monkeypatch.setattr(logprob, "BLOCK_LOGITS", block * vocab)

    def peak(chunk: int, trained: bool) -> float:
        hidden, weight = (torch.randn(n, dim).to(dtype).requires_grad_() for n in (tokens, vocab))
        arguments = (torch.randint(vocab, (tokens,)), torch.full((tokens,), 0.7))
        with LiveStorages() as live:
            head = Head(weight.requires_grad_(trained))
            logp, ent = logprob.token_logprobs(hidden, head, *arguments, chunk_tokens=chunk, entropy=True)
            (logp.sum() + ent.sum()).backward()
        return live.peak / (4 * vocab)

    chunks = (tokens, 32, 4)
    frozen, trained = ([peak(chunk, trains) for chunk in chunks] for trains in (False, True))
    assert frozen == sorted(frozen, reverse=True) and trained == sorted(trained, reverse=True)
    assert all(rows <= copies * chunk + (copies > 1) * dim + 10 * block for rows, chunk in zip(frozen, chunks))
    assert all(rows - of_frozen <= 1.1 * dim for rows, of_frozen in zip(trained, frozen))


@pytest.mark.parametrize("trained", [False, True])
def test_chunks_need_at_most_100_mib_beyond_gradients(monkeypatch, trained):
    """Of 1,024 tokens and vocabulary 32,768, of which an eighth is here, in fp32 with an entropy in the loss, by 128
    tokens at a time, in the first micro-batch of a step and in the next one."""
    share, dim = 8, 1792
    vocab, tokens = 32768 // share, 2048 // share
    monkeypatch.setattr(logprob, "BLOCK_LOGITS", logprob.BLOCK_LOGITS // share)
    monkeypatch.setattr(logprob, "SAVED_LOGITS_ON_CPU", 0)
    hidden, weight = (torch.randn(n, dim).requires_grad_() for n in (tokens, vocab))
    head, arguments = Head(weight.requires_grad_(trained)), (torch.randint(vocab, (tokens,)), torch.ones(tokens))
    for made in (hidden.nbytes + weight.nbytes * trained, 0):
        with LiveStorages() as live:
            logp, ent = logprob.token_logprobs(hidden, head, *arguments, chunk_tokens=128, entropy=True)
            (logp.sum() + ent.sum()).backward()
        assert live.peak - made < (100 << 20) / share
        del logp, ent


def _in_place(chunk: int, head: dict[str, Any], start: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    """`.grad` of the weight, before and after `times` backward passes of one graph."""
    x = _inputs(torch.float64)
    weight = x["weight"].requires_grad_()
    weight.grad = start.clone()
    logp, ent = _chunked({**x, "hidden": x["hidden"].requires_grad_()}, chunk, **head)
    total, before = logp.sum() + 0.3 * ent.sum(), weight.grad
    for _ in range(times):
        total.backward(retain_graph=True)
    return [before, weight.grad]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_the_gradient_of_a_head_is_added_to_that_of_earlier_micro_batches_in_place(head, times):
    x, start = _inputs(torch.float64), torch.randn(V, D, dtype=torch.float64)
    before, after = _in_place(7, head, start, times)
    logp, ent = _dense({**x, "weight": x["weight"].requires_grad_()}, **head)
    (want,) = torch.autograd.grad(logp.sum() + 0.3 * ent.sum(), x["weight"])
    assert after is before
    torch.testing.assert_close(after, start + times * want, rtol=1e-12, atol=1e-12)


def test_chunks_of_a_16_bit_head_are_summed_in_fp32_before_they_are_added():
    x, grads = _inputs(torch.bfloat16), list[torch.Tensor]()
    weight = x["weight"].requires_grad_()
    for start in (None, torch.zeros_like(weight)):
        weight.grad = start
        sum(each.sum() for each in _chunked(x, 1)).backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


def test_a_gradient_that_is_asked_for_is_returned_and_added_to_no_other():
    """By torch.autograd.grad, in the weight or in the hidden states alone."""
    x, start = _inputs(torch.float64), torch.ones(V, D, dtype=torch.float64)
    weight, hidden = x["weight"].requires_grad_(), x["hidden"].requires_grad_()
    found = []
    for score in (lambda y: _chunked(y, 7), _dense):
        weight.grad = start.clone()
        total = sum(each.sum() for each in score(x))
        found += torch.autograd.grad(total, weight, retain_graph=True)
        torch.autograd.grad(total, hidden, retain_graph=True)
        assert torch.equal(weight.grad, start)
        total.backward(inputs=[hidden])
        assert torch.equal(weight.grad, start)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_the_weight_sees_its_gradient(hook):
    x, seen = _inputs(torch.float64), list[torch.Tensor]()
    weight = x["weight"].requires_grad_()
    weight.grad = torch.zeros_like(weight)
    getattr(weight, hook)(lambda t: seen.append(t.detach().clone()))
    sum(each.sum() for each in _chunked(x, 7)).backward()
    assert len(seen) == 1 and weight.grad.abs().sum() > 0


def test_a_tied_head_and_its_embedding_add_up_over_micro_batches():
    x, found = _inputs(torch.float64), list[torch.Tensor]()
    ids = torch.arange(N) % V
    for score in (lambda y: _chunked(y, 7), _dense):
        weight = x["weight"].detach().clone().requires_grad_()
        for shift in range(3):
            hidden = torch.nn.functional.embedding((ids + shift) % V, weight).tanh() + x["hidden"]
            logp, ent = score({**x, "hidden": hidden, "weight": weight})
            (logp.sum() - ent.sum()).backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_second_backward_pass_gives_the_same_gradient(with_entropy):
    """The first one overwrites stored logits, in blocks or through a copy."""
    x = _inputs(torch.float64)
    hidden = x["hidden"].requires_grad_()
    logp, ent = token_logprobs(hidden, Head(x["weight"]), x["targets"], x["temperature"], chunk_tokens=7, entropy=True)
    total = logp.sum() + (ent.sum() if with_entropy else 0)
    (first,), (second,) = (torch.autograd.grad(total, hidden, retain_graph=True) for _ in range(2))
    dense = _dense({**x, "hidden": hidden})
    (want,) = torch.autograd.grad(dense[0].sum() + (dense[1].sum() if with_entropy else 0), hidden)
    torch.testing.assert_close(first, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(second, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("limit", "num_products"), [(N * V, 1), (N * V - 1, 8)])
def test_logits_are_stored_for_the_backward_pass_up_to_a_limit(monkeypatch, limit, num_products):
    """Above it, the forward and the backward pass compute them in chunks: here 4 of at most 6 tokens."""
    monkeypatch.setattr(logprob, "SAVED_LOGITS_ON_CPU", limit)
    monkeypatch.setattr(logprob, "CHUNK_LOGITS_ON_CPU", 6 * V)
    sizes = []
    computed = Head.logits
    monkeypatch.setattr(Head, "logits", lambda self, hidden: sizes.append(len(hidden)) or computed(self, hidden))
    x = _inputs(torch.float32)
    logp, _ = logprob.token_logprobs(x["hidden"].requires_grad_(), Head(x["weight"]), x["targets"], x["temperature"])
    logp.sum().backward()
    assert len(sizes) == num_products and sum(sizes) == N * (1 if num_products == 1 else 2)
    with torch.no_grad():
        logprob.token_logprobs(x["hidden"], Head(x["weight"]), x["targets"], x["temperature"])
    assert max(sizes[num_products:]) == 6, "without a gradient nothing is stored"


def test_an_accelerator_without_our_kernels_needs_one_copy_of_a_chunk_in_each_pass():
    """Of fp32 logits whose entropy has no gradient; on meta tensors."""
    tokens, vocab, dim = 64, 1000, 16
    with torch.device("meta"):
        hidden, weight = (torch.randn(n, dim).requires_grad_() for n in (tokens, vocab))
        targets, temperature = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    with _Copies(32 * vocab) as copies:
        logp, _ = logprob.token_logprobs(hidden, Head(weight), targets, temperature, chunk_tokens=32)
        logp.sum().backward()
    assert copies.count == 2 * 2
