"""The embedded engine's tokens and logprobs against Transformers' generate and the trainer's forward."""

import random

import numpy as np
import pytest
import torch
from tiny_engines import ask, plain, run, tiny_engine
from tiny_models import tiny_lm

from meshrl.core.errors import CapabilityError, ConfigError, MeshrlError, RequestError
from meshrl.core.types import turn_seed
from meshrl.model.attention import PackedAttention
from meshrl.model.causal import CausalModel

CONTEXTS = [[5, 9, 13, 17, 40, 41, 7, 8, 9], [33], list(range(3, 60)), [12, 50, 3]]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm("qwen2")


def generate_greedy(model, context, count):
    """Transformers' own greedy tokens, and the margin between the best and the second best logit of each."""
    out = model.generate(
        torch.tensor([context]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step[0].topk(2).values for step in out.logits])
    return out.sequences[0, len(context) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def trainer_logprobs(lm, turn, temperature):
    """Logprobs of a turn's tokens from the trainer's packed forward."""
    ids = torch.from_numpy(np.concatenate([turn.context_ids, turn.output_ids])).long()
    scored = torch.arange(len(turn.context_ids), len(ids))
    positions, context = torch.arange(len(ids)), PackedAttention([0, len(ids)], torch.device("cpu"))
    with torch.no_grad():
        return CausalModel(lm)(
            ids, positions, context, scored, scored - 1, torch.full((len(scored),), temperature), 64, False, {}
        )[0].numpy()


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_greedy_equals_transformers_generate(family):
    """Includes sliding windows and softcaps; all contexts in one batch, 80 tokens over two tiles."""
    lm = tiny_lm(family)
    turns = run(tiny_engine(lm), [ask(str(i), c, temperature=0, max_new_tokens=80) for i, c in enumerate(CONTEXTS)])
    reference, compared = plain(lm), 0
    for i, context in enumerate(CONTEXTS):
        want, margins = generate_greedy(reference, context, 80)
        for got, token, margin in zip(turns[str(i)].output_ids.tolist(), want, margins, strict=True):
            if margin < 1e-4:
                break
            assert got == token
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_logprobs_equal_the_trainers(family, temperature):
    """At lr 0 the ratio is 1, at any temperature."""
    lm = tiny_lm(family)
    requests = [
        ask(f"{i}/{g}", context, seed=turn_seed(0, i, g, 0), temperature=temperature, max_new_tokens=70)
        for i, context in enumerate(CONTEXTS)
        for g in range(3)
    ]
    for turn in run(tiny_engine(lm), requests).values():
        assert turn.stop_reason == "length" and len(turn.output_ids) == 70 and (turn.logprobs <= 0).all()
        np.testing.assert_allclose(turn.logprobs, trainer_logprobs(lm, turn, temperature), atol=1e-5, rtol=0)


def test_a_certain_model_scores_zero_at_every_sampled_position(lm):
    """The next token is this token + 1 with certainty; a logprob shifted by one position would be far from 0."""
    certain = tiny_lm("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        for p in certain.parameters():
            p.zero_()
        certain.model.norm.weight.fill_(1.0)
        certain.model.embed_tokens.weight.copy_(torch.eye(64, 32))
        certain.lm_head.weight.copy_(torch.roll(torch.eye(64, 32), 1, dims=0) * 100)
    turn = run(tiny_engine(certain), [ask("a", [3, 4, 5], max_new_tokens=8)])["a"]
    assert turn.output_ids.tolist() == list(range(6, 14)) and turn.logprobs.tolist() == [0.0] * 8


# ---- seeds


def sample_requests(count, rng):
    """Groups and single requests, contexts from 1 to 90 tokens, outputs from 1 to 100."""
    contexts = [[rng.randrange(64) for _ in range(rng.choice((1, 8, 63, 64, 65, 90)))] for _ in range(count // 3)]
    return [
        ask(
            f"r{i}",
            rng.choice(contexts),
            seed=turn_seed(7, i, 0, 0),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            max_new_tokens=rng.randint(1, 100),
            stop_token_ids=(2, 3),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_batch_composition_changes_no_tokens(lm, seed):
    """Requests get the same tokens alone and in any batch, order, row and step."""
    rng = random.Random(seed)
    requests = sample_requests(18, rng)
    engine = tiny_engine(lm, max_running=5, prefill_tokens_per_step=100)
    pending, turns = list(requests), {}
    while pending or engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 6))):
            if pending:
                engine.submit(pending.pop())
        turns.update(engine.step())
        assert engine.stats().running <= 5
    alone = tiny_engine(lm, max_running=1)
    for request in requests:
        want, got = run(alone, [request])[request.id], turns[request.id]
        assert got.output_ids.tolist() == want.output_ids.tolist() and got.stop_reason == want.stop_reason
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        assert 1 <= len(got.output_ids) <= request.max_new_tokens
    assert engine.stats().cached_tokens == engine.stats().running == 0


def test_samples_of_a_group_differ_and_are_reproducible(lm):
    """Another index has another seed; the same request gets the same answer again."""
    requests = [ask(str(g), CONTEXTS[0], seed=turn_seed(0, 5, g, 0), max_new_tokens=20) for g in range(8)]
    engine = tiny_engine(lm)
    first, again = run(engine, requests), run(engine, requests[::-1])
    outputs = [tuple(first[str(g)].output_ids) for g in range(8)]
    assert len(set(outputs)) == 8 and outputs == [tuple(again[str(g)].output_ids) for g in range(8)]


def test_a_group_is_prefilled_once(lm):
    """Also when only three of eight requests have rows at a time, and another request is between them in the queue."""
    context = list(range(10, 50))
    group = [ask(str(g), context, seed=g, max_new_tokens=3 + g) for g in range(8)]
    engine = tiny_engine(lm, max_running=3)
    turns = run(engine, [*group[:4], ask("other", [1, 2]), *group[4:]])
    assert engine.stats().prefill_tokens == len(context) - 1 + 8 + 2  # each computes the last token for itself
    assert engine.stats().decode_tokens == sum(len(t.output_ids) for t in turns.values())
    assert sorted(turns[str(g)].times.cached_tokens for g in range(8)) == [0] + [len(context) - 1] * 7
    run(engine, [ask("late", context)])
    assert engine.stats().prefill_tokens == len(context) - 1 + 9 + 2  # nothing needed the memory of the prompt


def test_long_contexts_do_not_hold_up_running_requests(lm):
    """A step computes contexts within its budget, or one longer context alone, and every running row gets a token."""
    engine = tiny_engine(lm, prefill_tokens_per_step=50)
    engine.submit(ask("first", [4, 5], max_new_tokens=30))
    engine.step()
    for i in range(6):
        engine.submit(ask(f"long{i}", [i] * (90 if i == 3 else 20), max_new_tokens=30))
    filled = []
    for _ in range(4):
        before = engine.stats()
        engine.step()
        filled.append(engine.stats().prefill_tokens - before.prefill_tokens)
        assert engine.stats().decode_tokens - before.decode_tokens == engine.stats().running
    assert filled == [40, 20, 90, 40]


# ---- where a turn ends


def certain_output(lm, count=30):
    """A greedy continuation from which stop ids are chosen."""
    return run(tiny_engine(lm), [ask("a", CONTEXTS[0], temperature=0, max_new_tokens=count)])["a"].output_ids.tolist()


def test_stop_ids_end_a_turn_and_belong_to_it(lm):
    """For the engine's stop ids and the request's own; the stop token is sampled, so it is part of the output."""
    sure = certain_output(lm)
    at = next(i for i in range(3, 30) if sure[i] not in sure[:i])
    engine = tiny_engine(lm, stop_token_ids=(sure[at], 999))
    stopped = ask("a", CONTEXTS[0], temperature=0, max_new_tokens=30)
    turn = run(engine, [stopped])["a"]
    assert turn.output_ids.tolist() == sure[: at + 1] and turn.stop_reason == "stop"
    assert len(turn.logprobs) == len(turn.versions) == at + 1
    own = ask("a", CONTEXTS[0], temperature=0, max_new_tokens=30, stop_token_ids=(sure[0],))
    assert run(engine, [own])["a"].output_ids.tolist() == sure[:1]  # EOS first
    on = ask("a", CONTEXTS[0], temperature=0, max_new_tokens=30, ignore_eos=True)
    assert run(engine, [on])["a"].output_ids.tolist() == sure and run(engine, [on])["a"].stop_reason == "length"
    at_limit = ask("a", CONTEXTS[0], temperature=0, max_new_tokens=at + 1)
    assert run(engine, [at_limit])["a"].stop_reason == "stop"


def test_a_stop_token_in_the_context_is_a_token_like_any_other(lm):
    """Pad = eos, eos inside the prompt: lengths determine where a row ends, never token values."""
    context = [0, 2, 2, 5, 2]
    want, _ = generate_greedy(plain(lm), context, 5)
    engine = tiny_engine(lm, stop_token_ids=(2,))
    got = run(engine, [ask("a", context, temperature=0, max_new_tokens=5, ignore_eos=True)])["a"]
    assert got.output_ids.tolist() == want


def test_limits_end_a_turn_with_their_own_reasons(lm):
    engine = tiny_engine(lm, max_context_tokens=12)
    turns = run(engine, [ask("length", [3] * 5, max_new_tokens=7), ask("context", [3] * 5, max_new_tokens=8)])
    assert {name: (t.stop_reason, len(t.output_ids)) for name, t in turns.items()} == {
        "length": ("length", 7),
        "context": ("context", 7),
    }
    last = run(engine, [ask("full", [3] * 11, max_new_tokens=8)])["full"]
    assert len(last.output_ids) == 1 and last.stop_reason == "context"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"context": [3] * 256}, RequestError, "256 context .* never fit.* 256 tokens"),
        ({"context": []}, RequestError, "empty"),
        ({"context": [3, 64]}, RequestError, "0 to 63.* 64"),
        ({"prefix_output": np.array([1, -1])}, RequestError, "prefix_output"),
        ({"prefix_output": np.array([1] * 16)}, RequestError, "max_new_tokens is 16 .* 16 tokens"),
        ({"temperature": -1.0}, RequestError, "temperature is -1.0"),
        ({"top_p": 0.0}, RequestError, "top_p"),
        ({"want": ("logits",)}, CapabilityError, "logits"),
        ({"want": ("topk:0",)}, CapabilityError, "topk:0"),
        ({"adapter": "a"}, CapabilityError, "adapter"),
        ({"media_spans": [("m", 0, 1)]}, CapabilityError, "has images"),
    ],
)
def test_invalid_requests_are_refused_by_submit(lm, change, error, words):
    engine = tiny_engine(lm)
    with pytest.raises(error, match=words):
        engine.submit(ask("a", change.pop("context", [3, 4]), **change))
    assert not engine.has_work


def test_ids_must_be_unique_among_unfinished_requests(lm):
    engine = tiny_engine(lm)
    engine.submit(ask("a", [3]))
    with pytest.raises(RequestError, match="unique"):
        engine.submit(ask("a", [4]))
    while engine.has_work:
        engine.step()
    run(engine, [ask("a", [4])])


# ---- evaluation and extras


def test_filters_and_extras_apply_per_request_in_a_mixed_batch(lm):
    engine = tiny_engine(lm)
    requests = [
        ask("plain", CONTEXTS[0], seed=1),
        ask("k1", CONTEXTS[0], seed=1, top_k=1),
        ask("greedy", CONTEXTS[0], temperature=0),
        ask("rep", CONTEXTS[0], temperature=0, repetition_penalty=1e6),
        ask("extras", CONTEXTS[0], seed=1, want=("entropy", "topk:3")),
    ]
    turns = run(engine, requests)
    assert turns["k1"].output_ids.tolist() == turns["greedy"].output_ids.tolist()
    fresh = set(turns["rep"].output_ids.tolist()) - set(CONTEXTS[0])
    assert len(fresh) == 16  # no token of the context or of the output is repeated
    assert turns["extras"].output_ids.tolist() == turns["plain"].output_ids.tolist()
    extras = turns["extras"].extras
    assert {name: x.shape for name, x in extras.items()} == {
        "entropy": (16,),
        "topk_ids": (16, 3),
        "topk_logprobs": (16, 3),
    }
    assert (extras["entropy"] > 0).all() and (np.diff(extras["topk_logprobs"], axis=1) <= 0).all()
    assert turns["plain"].extras == {}


def test_bfloat16_logprobs_are_computed_in_fp32():
    """Buffers stay fp32 in a bf16 model, and logprobs come from fp32 logits."""
    low = tiny_lm("qwen2", dtype=torch.bfloat16)
    engine = tiny_engine(low)
    turn = run(engine, [ask("a", CONTEXTS[2], max_new_tokens=40)])["a"]
    assert np.abs(turn.logprobs - trainer_logprobs(low, turn, 1.0)).max() < 0.5
    assert len(np.unique(turn.logprobs)) > 35


def test_broken_weights_raise_instead_of_sampling(lm):
    broken = tiny_lm("qwen2")
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    engine = tiny_engine(broken)
    engine.submit(ask("a", [3]))
    with pytest.raises(MeshrlError, match=r"not numbers \(NaN\) at weight version 0"):
        engine.step()


def test_an_engine_from_a_folder(tmp_path, lm):
    """It has the configured compute dtype, fp32 buffers, no gradients, and the model's context length."""
    from meshrl.config.model import ModelConfig
    from meshrl.config.rollout import RolloutConfig
    from meshrl.rollout.embedded.engine import build_embedded_engine

    lm.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    engine = build_embedded_engine(model, RolloutConfig(max_running_requests=3), torch.device("cpu"), "e-0", (2,))
    held = engine._weights.lm
    assert {p.dtype for p in held.parameters()} == {torch.bfloat16} and not held.training
    assert {b.dtype for b in held.buffers()} == {torch.float32} and not any(p.requires_grad for p in held.parameters())
    assert (engine.max_context_tokens, engine._scheduler.max_running, engine.stats().version) == (1024, 3, -1)
    engine.trust_loaded_weights()
    assert run(engine, [ask("a", [3, 4])])["a"].engine_id == "e-0"
    with pytest.raises(ConfigError, match=r"5000.* 1024 positions"):
        too_long = RolloutConfig(max_context_tokens=5000)
        build_embedded_engine(model, too_long, torch.device("cpu"), "e-0", ())


def test_all_positions_can_be_used_and_a_longer_context_is_refused(lm):
    """Beyond the model's positions there is no rotation; on an accelerator the lookup would end the process."""
    engine = tiny_engine(lm, max_context_tokens=256)
    turn = run(engine, [ask("a", np.arange(255) % 60)])["a"]
    assert (len(turn.output_ids), turn.stop_reason) == (1, "context")
    with pytest.raises(RequestError, match="256 context"):
        engine.submit(ask("b", np.arange(256) % 60))
    with pytest.raises(RequestError, match="ids from"):
        engine.submit(ask("c", [1, 10_000]))


def test_an_urgent_request_waits_for_no_other_and_the_others_keep_their_rows(lm):
    """A probe of new weights must not wait for long answers, and must not let in more of them."""
    engine = tiny_engine(lm, max_running=2)
    for i in range(4):
        engine.submit(ask(f"{i}", [3 + i, 5], max_new_tokens=30, ignore_eos=True))
    engine.step()
    urgent = [ask(f"urgent {i}", [7, 8], seed=i, max_new_tokens=4, ignore_eos=True, is_urgent=True) for i in range(2)]
    for request in urgent:
        engine.submit(request)
    *before, last = (engine.step() for _ in range(4))
    assert not any(before) and {name for name, _ in last} == {"urgent 0", "urgent 1"}
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)
    alone = run(tiny_engine(lm), urgent)
    for name, turn in last:
        np.testing.assert_array_equal(turn.output_ids, alone[name].output_ids)
