"""Packed attention equals its rows one by one, leaks nothing between rows, and costs the sum of l^2."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, tiny_lm
from tiny_packs import answers_to_one_prompt, plain_logprobs, score_pack
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.core.errors import ConfigError
from meshrl.model.attention import ALIGNED_KEYS, CHEAP_WASTE, AttentionSpec, PackedAttention
from meshrl.model.causal import CausalModel
from meshrl.model.ulysses import UlyssesAttention
from meshrl.parallel.exchange import Axis
from meshrl.train.packing import pack

CPU = torch.device("cpu")
HYBRIDS = ("qwen3_5_text", "lfm2", "mamba2")
WILD = [1, 300, 2, 17, 300, 3, 900, 1, 64, 5, 17, 20]  # more than one bucket, some padded and some not


def _bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _qkv(tokens: int, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, 8, generator=g, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


def _dense_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """One row [l, H, D] by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    hidden = (behind < 0) | (behind >= (spec.window or len(q)))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -math.inf), -1), v)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.3),
        AttentionSpec(0.3, window=6),
        AttentionSpec(0.3, softcap=2.0),
        AttentionSpec(0.3, window=6, softcap=2.0),
    ],
    ids=["plain", "window", "softcap", "both"],
)
@pytest.mark.parametrize("lengths", [WILD, [7], [5, 5, 5], [3, 8, 8, 1, 3]], ids=str)
def test_packed_rows_equal_the_definition_row_by_row(lengths, spec):
    cu = _bounds(lengths)
    packed = PackedAttention(cu, CPU)
    q, k, v = _qkv(cu[-1])
    got = packed.attend(0, q, k, v, spec)
    for a, b in itertools.pairwise(cu):
        torch.testing.assert_close(got[a:b], _dense_row(q[a:b], k[a:b], v[a:b], spec), rtol=1e-9, atol=1e-9)


def test_wild_lengths_take_several_buckets_of_every_kind():
    """So that the test above covers all kinds of buckets."""
    padded, equal, sorted_only = (PackedAttention(_bounds(n), CPU).padded(1) for n in (WILD, [5, 5, 5], [3, 8, 8, 3]))
    assert len(padded.buckets) > 1 and sum(b.num_queries for b in padded.buckets) > sum(WILD)
    assert equal.queries is equal.keys is equal.back is None  # nothing is copied
    assert sorted_only.queries is not None


def test_empty_rows_take_no_part():
    q, k, v = _qkv(8)
    with_gaps, without = (
        PackedAttention(cu, CPU).attend(0, q, k, v, AttentionSpec(0.3)) for cu in ([0, 0, 3, 3, 8, 8], [0, 3, 8])
    )
    assert torch.equal(with_gaps, without)


class _Cost(TorchDispatchMode):
    """Counts the score elements that attention computes for each head, fused or not, and the largest tensor."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.scores, self.largest = heads, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func):
            batch, _, length, _ = args[0].shape
            self.scores += batch * length * args[1].shape[2]
        elif "softmax" in str(func):
            self.scores += out.numel() // self.heads
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("seed", range(8))
def test_a_pack_costs_what_its_rows_cost_one_by_one(seed):
    """At most 1.25 times the sum of l^2, plus what is cheaper than a kernel launch; in few kernel launches."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, np.log([60, 500, 1200][seed % 3]), rng.integers(1, 40))).astype(int).tolist()
    tokens, exact = sum(lengths), sum(n * n for n in lengths)
    with _Cost(heads=2) as cost:
        packed = PackedAttention(_bounds(lengths), CPU)
        packed.attend(0, *_qkv(tokens, heads=2, kv_heads=2), AttentionSpec(0.3))
    num_buckets = len(packed.padded(1).buckets)
    assert exact <= cost.scores <= 1.25 * exact + num_buckets * CHEAP_WASTE
    assert num_buckets <= 12


def test_answers_to_prompts_of_equal_length_share_a_bucket():
    """The number of kernel launches does not grow with the number of groups; one long answer stays apart."""
    rng = np.random.default_rng(0)
    lengths, parents = [], []
    for group in range(24):
        prompt = len(lengths)
        answers = [200, 210] if group == 5 else rng.integers(15, 22, 2).tolist()
        lengths += [10 + group % 2, *answers]
        parents += [-1, prompt, prompt]
    buckets = PackedAttention(_bounds(lengths), CPU, parents).padded(1).buckets
    assert sorted((b.prefix, b.rows) for b in buckets) == [(0, 24), (10, 24), (11, 2), (11, 22)]


def test_a_long_pack_of_short_rows_makes_nothing_of_its_square():
    """No mask and no scores of T x T."""
    lengths = [16] * 600
    with _Cost(heads=1) as cost:
        PackedAttention(_bounds(lengths), CPU).attend(0, *_qkv(sum(lengths), 1, 1), AttentionSpec(0.3))
    assert cost.scores == 600 * 16 * 16
    assert cost.largest <= 600 * 16 * 16


def _score(model: CausalModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Packed logprobs of every token but the first, of each row."""
    lengths = [len(r) for r in rows]
    cu = _bounds(lengths)
    scored = torch.cat([torch.arange(a + 1, b) for a, b in itertools.pairwise(cu)])
    with torch.no_grad():
        logp, _ = model(
            torch.cat(rows),
            torch.cat([torch.arange(n) for n in lengths]),
            PackedAttention(cu, CPU),
            scored,
            scored - 1,
            torch.ones(len(scored)),
            64,
            False,
            {},
        )
    return list(logp.split([n - 1 for n in lengths]))


def _rows(seed: int, lengths: list[int]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=g) for n in lengths]


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_packed_logprobs_equal_plain_transformers_one_row_at_a_time(family):
    rows = _rows(1, [9, 2, 30, 9, 17, 3])
    packed = _score(CausalModel(tiny_lm(family)), rows)
    plain = tiny_lm(family)
    plain.set_attn_implementation("eager")  # the only one of Transformers' that supports a softcap
    for row, got in zip(rows, packed, strict=True):
        with torch.no_grad():
            logq = torch.log_softmax(plain(row[None]).logits[0].double(), -1)
        want = logq[:-1].gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in (*FAMILIES, *HYBRIDS)),
        *((family, torch.bfloat16) for family in ("qwen2", "gemma2", "qwen3_5_text")),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_changing_one_row_changes_no_bit_of_another(family, dtype):
    """For the attention and the states of each family, inside one padded bucket and across buckets."""
    model = CausalModel(tiny_lm(family, dtype))
    rows = _rows(2, [520, 40, 12, 12, 5, 400])
    before = _score(model, rows)
    for changed in (0, 3):
        other = list(rows)
        other[changed] = (rows[changed] + 7) % 64
        after = _score(model, other)
        for i in range(len(rows)):
            assert torch.equal(before[i], after[i]) == (i != changed), f"row {i} after a change of row {changed}"


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_answers_after_a_shared_prompt_equal_plain_transformers_one_row_at_a_time(family):
    """With windows that end inside the prompt, and answers of one token."""
    samples = answers_to_one_prompt(3, 9, [5, 1, 30, 5])
    packed, context = score_pack(CausalModel(tiny_lm(family)), samples)
    assert context.num_tokens < sum(map(len, samples))
    plain = tiny_lm(family)
    plain.set_attn_implementation("eager")
    for got, want in zip(packed, plain_logprobs(plain, samples, 9), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_changing_one_answer_changes_no_bit_of_the_others_that_share_its_prompt(family):
    model = CausalModel(tiny_lm(family))
    samples = answers_to_one_prompt(4, 12, [40, 7, 7, 1])
    before, _ = score_pack(model, samples)
    for changed in range(len(samples)):
        original = samples[changed].tokens.copy()
        samples[changed].tokens[12:] = (original[12:] + 7) % 64
        after, _ = score_pack(model, samples)
        samples[changed].tokens[:] = original
        for i in range(len(samples)):
            assert torch.equal(before[i], after[i]) == (i != changed), f"answer {i} after a change of {changed}"


@pytest.mark.parametrize("seed", range(4))
def test_sharing_a_prompt_never_costs_more_than_not_sharing_it(seed):
    rng = np.random.default_rng(seed)
    prompt, answers = int(rng.integers(1, 400)), rng.integers(1, 300, 12).tolist()
    costs = []
    for share in (True, False):
        batch = pack(answers_to_one_prompt(seed, prompt, answers), list(range(12)), share_prefix=share)
        with _Cost(heads=2) as cost:
            context = PackedAttention(batch.cu_seqlens.tolist(), CPU, batch.parents)
            context.attend(0, *_qkv(batch.num_tokens, heads=2, kv_heads=2), AttentionSpec(0.3))
        costs.append(cost.scores)
    assert costs[0] <= costs[1]


def test_a_model_called_without_a_context_is_refused():
    lm = tiny_lm("qwen2")
    with pytest.raises(ValueError, match="without attention_context"):
        lm(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(
    ("lengths", "parents"),
    [([9, 5, 7, 6, 3], None), ([9, 5, 7, 6, 3], [-1, 0, 0, -1, 3]), ([6, 5, 7, 6, 3], [-1, 0, 0, -1, 3])],
    ids=["rows", "families", "prompts_of_equal_length"],
)
def test_rows_padded_to_full_vectors_equal_the_definition_in_bf16(lengths, parents):
    """On a CPU, keys in bf16 are padded for speed; the padding must not be visible. Answers to prompts of equal length
    share a batch, and each sees its own prompt."""
    cu = _bounds(lengths)
    packed = PackedAttention(cu, CPU, parents)
    assert all((b.prefix + b.length) % ALIGNED_KEYS == 0 for b in packed.padded(ALIGNED_KEYS).buckets)
    q, k, v = (x.bfloat16() for x in _qkv(cu[-1]))
    got = packed.attend(0, q, k, v, AttentionSpec(0.3)).double()
    for s, (a, b) in enumerate(itertools.pairwise(cu)):
        parent = -1 if parents is None else parents[s]
        before = slice(cu[parent], cu[parent + 1]) if parent >= 0 else slice(0, 0)
        rows = [torch.cat([x[before], x[a:b]]).double() for x in (q, k, v)]
        want = _dense_row(*rows, AttentionSpec(0.3))[-(b - a) :]
        torch.testing.assert_close(got[a:b], want, rtol=0, atol=0.03)


@pytest.mark.parametrize("spec", [AttentionSpec(0.3), AttentionSpec(0.3, softcap=400.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("length", [20, 100])
def test_scores_in_bf16_keep_their_small_differences(length, spec):
    """A score that all keys share (here about 195, as from a key bias) has no effect on the values and the gradients,
    but scores rounded to bf16 would differ by up to 0.5 each."""
    leaves = [x.bfloat16() for x in _qkv(length)]
    for x in leaves[:2]:
        x[..., 7] = 25.5
    got_leaves, wide = ([x.to(t, copy=True).requires_grad_() for x in leaves] for t in (torch.bfloat16, torch.float64))
    got = PackedAttention([0, length], CPU).attend(0, *got_leaves, spec)
    want = _dense_row(*wide, spec)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for out in (got, want):
        (out * weights).sum().backward()
    assert got.dtype == torch.bfloat16
    for x, y in zip([got, *(x.grad for x in got_leaves)], [want, *(x.grad for x in wide)], strict=True):
        assert (x.double() - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(6, 2, 4), (12, 4, 3)])
def test_heads_that_ulysses_can_not_split_are_refused_with_the_possible_sizes(heads: int, key_heads: int, size: int):
    q, k = torch.zeros(5, heads, 8), torch.zeros(5, key_heads, 8)
    attention = UlyssesAttention(PackedAttention([0, 5], q.device), Axis(size, 0, None))
    with pytest.raises(ConfigError, match=r"Use one of 1, 2(, 6|, 4, 12)$"):
        attention.attend(0, q, k, k, AttentionSpec(1.0))


def test_ulysses_refuses_layers_with_a_state():
    """Each rank would compute the states from the start of its own tokens."""
    context = UlyssesAttention(PackedAttention([0, 5], CPU), Axis(2, 0, None))
    with pytest.raises(ConfigError, match=r"train\.mesh\.ulysses is 2, but the model has layers that pass a state"):
        CausalModel(tiny_lm("lfm2")).hidden(torch.arange(5), torch.arange(5), context)
