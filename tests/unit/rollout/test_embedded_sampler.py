"""Sampling tokens: exact logprobs, counter-based randomness, filters for evaluation."""

import numpy as np
import pytest
import torch
from tiny_engines import ask

from meshrl.core.types import mix64
from meshrl.rollout.admission import Bounds
from meshrl.rollout.embedded.decode_graph import StepArrays
from meshrl.rollout.embedded.rows import Rows, Sequence
from meshrl.rollout.embedded.sampler import RowSampling, block_ends, draw, inverse_cdf, uniforms

CPU = torch.device("cpu")


def find(weights, u):
    return inverse_cdf(weights, block_ends(weights), u)


def logits_of(rows=1, vocab=200, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw_many(requests, logits, position=0, history=None):
    rows, bounds = Rows(), Bounds(stop_ids=frozenset(), limit=1, limit_reason="length")
    for slot, request in zip(reversed(range(len(requests))), requests):
        rows.add(Sequence(request, bounds, None), slot, request.context_ids, 1)
    rows.position[:] = position
    return draw(logits.clone(), RowSampling(rows, StepArrays(CPU)), history or (lambda row: np.array([0])))


def frequencies(params, logits, count=4000, history=None):
    """How often each token is drawn over many seeds."""
    requests = [ask("r", [0], seed=mix64(i), **params) for i in range(count)]
    drawn = draw_many(requests, logits.expand(count, -1), history=history)
    return torch.bincount(drawn.tokens, minlength=logits.shape[-1]) / count, drawn


def test_uniforms_are_the_documented_function_of_seed_and_position():
    """64-bit integer arithmetic, so that all devices and engines draw the same tokens."""
    seeds, positions = [0, 1, 2**63 - 1, 12345678901234567], [0, 7, 1, 2**20]
    got = uniforms(np.array(seeds, np.uint64), np.array(positions))
    assert got.tolist() == [(mix64(s ^ mix64(p)) >> 11) * 2.0**-53 for s, p in zip(seeds, positions)]
    many = uniforms(np.arange(20000, dtype=np.uint64), np.zeros(20000, np.int64))
    assert abs(many.mean() - 0.5) < 0.01 and many.min() >= 0 and many.max() < 1
    assert np.abs(np.histogram(many, 10)[0] - 2000).max() < 200


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 300])
def test_inverse_cdf_never_returns_a_token_of_probability_zero(vocab):
    """With zeros at both ends and in between, and u at both ends of [0, 1)."""
    edges = torch.tensor([0.0, 1e-300, 0.25, 0.5, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        probs = torch.rand(vocab, generator=generator) * (torch.rand(vocab, generator=generator) > 0.6)
        probs[torch.randint(vocab, (1,), generator=generator)] = 1e-30
        tokens = find(probs.expand(len(edges), -1), edges)
        assert (probs[tokens] > 0).all()
    only = torch.zeros(len(edges), vocab)
    only[:, -1] = 0.5
    assert (find(only, edges) == vocab - 1).all()


def test_inverse_cdf_is_the_first_token_whose_cumulative_sum_exceeds_u():
    probs = torch.softmax(logits_of(50, 333), -1)
    u = torch.from_numpy(uniforms(np.arange(50, dtype=np.uint64), np.zeros(50, np.int64)))
    cdf = probs.double().cumsum(-1)
    assert torch.equal(find(probs, u), (cdf <= u[:, None] * cdf[:, -1:]).sum(-1))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution_and_draws_follow_it(temperature):
    """Log_softmax(logits / T), T after the fp32 upcast."""
    logits = logits_of(vocab=40)
    want = torch.log_softmax(logits[0].double() / temperature, -1)
    seen, drawn = frequencies({"temperature": temperature}, logits)
    torch.testing.assert_close(drawn.logprobs.double(), want[drawn.tokens], rtol=0, atol=1e-6)
    assert (seen - want.exp()).abs().max() < 0.03


def test_greedy_takes_the_best_and_scores_it_at_temperature_one():
    logits = logits_of(3)
    drawn = draw_many([ask("a", [0], temperature=0), ask("b", [0]), ask("c", [0], temperature=0)], logits)
    want = torch.log_softmax(logits, -1)
    assert drawn.tokens[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    torch.testing.assert_close(drawn.logprobs, want.gather(1, drawn.tokens[:, None])[:, 0])


def test_a_draw_does_not_depend_on_the_other_rows():
    """Other rows, their order and their parameters change nothing."""
    logits = logits_of(4)
    requests = [ask(str(i), [0], seed=100 + i, temperature=t) for i, t in enumerate((0.0, 0.7, 1.0, 1.3))]
    alone = [draw_many([r], logits[i : i + 1]).tokens.item() for i, r in enumerate(requests)]
    assert draw_many(requests, logits).tokens.tolist() == alone
    assert draw_many(requests[::-1], logits.flip(0)).tokens.tolist() == alone[::-1]
    many, same = [ask("x", [0], seed=s) for s in range(50)], logits[:1].expand(50, -1)
    assert draw_many(many, same, position=1).tokens.tolist() != draw_many(many, same).tokens.tolist()


def allowed_by(name, logits):
    """The tokens that a filter does not remove."""
    probs = torch.softmax(logits, -1)
    ranked = probs.argsort(descending=True).tolist()
    if name == "top_k":
        return set(ranked[:3])
    if name == "min_p":
        return {t for t in ranked if probs[t] >= 0.2 * probs.max()}
    total, nucleus = 0.0, set()
    for t in ranked:
        if total >= 0.7:
            break
        nucleus.add(t)
        total += probs[t].item()
    return nucleus


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.7), ("min_p", 0.2)])
def test_filters_restrict_draws_and_logprobs_stay_unfiltered(name, value):
    logits = logits_of(vocab=40) / 3
    left = allowed_by(name, logits[0])
    assert 1 < len(left) < 20
    seen, drawn = frequencies({name: value}, logits)
    probs = torch.softmax(logits[0], -1)
    want = torch.zeros(40)
    for t in left:
        want[t] = probs[t] / sum(probs[list(left)])
    assert set(seen.nonzero()[:, 0].tolist()) == left and (seen - want).abs().max() < 0.03
    torch.testing.assert_close(drawn.logprobs, probs.log()[drawn.tokens])


def test_repetition_penalty_divides_good_and_multiplies_bad_logits_of_seen_tokens():
    logits = torch.tensor([[2.0, 1.8, -1.0, -1.1]])
    penalised = torch.tensor([1.0, 1.8, -2.0, -1.1])
    seen, drawn = frequencies({"repetition_penalty": 2.0}, logits, history=lambda row: np.array([2, 0, 0]))
    assert (seen - torch.softmax(penalised, -1)).abs().max() < 0.03
    torch.testing.assert_close(drawn.logprobs, torch.log_softmax(logits[0], -1)[drawn.tokens])
    greedy = ask("g", [0], temperature=0, repetition_penalty=2.0)
    assert draw_many([greedy], logits, history=lambda row: np.array([2, 0])).tokens.tolist() == [1]


def test_extras_describe_the_distribution_that_was_drawn_from():
    logits = logits_of(2, vocab=30)
    rows = [ask("a", [0]), ask("b", [0], temperature=0.7, want=("entropy", "topk:4"))]
    extras = draw_many(rows, logits).extras
    logp = torch.log_softmax(logits[1] / 0.7, -1)
    assert set(extras) == {1}
    assert extras[1]["entropy"] == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-5)
    assert extras[1]["topk_ids"].tolist() == logp.topk(4).indices.tolist()
    np.testing.assert_allclose(extras[1]["topk_logprobs"], logp.topk(4).values.numpy(), atol=1e-5)
