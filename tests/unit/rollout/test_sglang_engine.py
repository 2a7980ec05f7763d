"""The SGLang engine with faults of the server, and the traps of SGLang's interface."""

import asyncio

import httpx2
import numpy as np
import pytest
from sglang_servers import HEADERS, broken, sglang_client
from tiny_engines import ask, deliveries, layout_of, sync
from tiny_models import tiny_lm
from tiny_tokenizers import numbered_tokenizer

from meshrl.core.errors import CapabilityError, ConfigError, EngineFailure, RequestError, StaleWeightsError, SyncError
from meshrl.rollout.admission import Bounds
from meshrl.rollout.server.answer import ServerAnswer
from meshrl.rollout.server.http import HttpClient
from meshrl.rollout.sglang.dialect import LOADER, SglangDialect, part_of, require_fit
from meshrl.rollout.stop_strings import StopStrings
from meshrl.sync.layout import SyncHeader

CONTEXT = list(range(10, 30))

pytestmark = pytest.mark.timeout(300)  # the server's start is part of the first test's time


@pytest.fixture(scope="module")
def lm():
    return tiny_lm("qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def other():
    return tiny_lm("qwen2", tie_word_embeddings=True, seed=1)


def go(url, main, **changes):
    """Run a test with an engine for the server, within a deadline."""

    async def run():
        engine = sglang_client(url, **changes)
        try:
            await asyncio.wait_for(main(engine), 100)
        finally:
            await engine.close()

    asyncio.run(run())


async def ready(engine, lm, version=0):
    await engine.reconcile(layout_of(lm))
    return await sync(lm, engine, version)


def post(url, path, body):
    """Send a request as another client of the server."""
    assert httpx2.post(url + path, json=body, headers=HEADERS, trust_env=False).status_code == 200


async def until_tokens(engine, count):
    while engine.stats().decode_tokens < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("fault", "error", "expected"),
    [
        ("wrong_echo", RequestError, "sent 20 ids and echoed 21 ids"),
        ("no_logprobs", EngineFailure, "and 0 logprobs"),
        ("other_logprobs", EngineFailure, "logprobs of other tokens"),
    ],
)
def test_an_incomplete_answer_is_refused(sglang_server, lm, fault, error, expected):
    """The trainer never gets ids that were changed by a template, or logprobs of other tokens."""

    async def main(engine):
        await ready(engine, lm)
        with broken(sglang_server, fault), pytest.raises(error, match=expected):
            await engine.generate(ask("a", CONTEXT))
        assert engine.stats().running == 0
        await engine.generate(ask("a", CONTEXT))

    go(sglang_server, main)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("error", "something broke in here"), ("disconnect", "interrupted|without its closing event")],
)
def test_a_broken_stream_is_an_engine_failure(sglang_server, lm, fault, expected):
    """No request is repeated: the second sample would have the same seed and count as another one."""

    async def main(engine):
        await ready(engine, lm)
        with broken(sglang_server, fault, path="/generate"), pytest.raises(EngineFailure, match=expected):
            await engine.generate(ask("a", CONTEXT, max_new_tokens=100, ignore_eos=True))

    go(sglang_server, main)


def test_a_tensor_that_the_server_drops_is_named(sglang_server, lm, other):
    """SGLang's loaders silently ignore names; the read-back detects it."""
    name = "model.layers.1.self_attn.k_proj.weight"  # a part of a fused parameter

    async def main(engine):
        await ready(engine, lm)
        with broken(sglang_server, "drop_weights", names=[name]), pytest.raises(SyncError) as error:
            await sync(other, engine, 1)
        assert f"{name} still has the values of version 0" in str(error.value)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        assert (await sync(other, engine, 2)).read_back is True
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {2}

    go(sglang_server, main)


def test_a_cache_that_is_not_dropped_ends_the_sync(sglang_server, lm, other):

    async def main(engine):
        await ready(engine, lm)
        with broken(sglang_server, "no_flush"), pytest.raises(RequestError, match="cache was not flushed"):
            await sync(other, engine, 1)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))

    go(sglang_server, main)


def test_tokens_of_mixed_weights_are_left_out(sglang_server, lm, other):
    """A request that runs when a sync is cancelled returns only the tokens of the last complete version."""

    async def main(engine):
        await ready(engine, lm)
        task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=220, ignore_eos=True)))
        await until_tokens(engine, 20)
        layout = layout_of(other)
        await engine.begin(SyncHeader(version=1, layout_hash=layout.hash))
        for delivery in list(deliveries(other, layout))[:-3]:
            await engine.receive(delivery)
        await engine.cancel()
        turn = await task
        assert turn.stop_reason == "abort" and 20 <= len(turn.output_ids) < 220
        assert set(turn.versions) == {0} and len(turn.logprobs) == len(turn.output_ids)
        again = await _fresh(engine, lm, turn)
        np.testing.assert_array_equal(turn.output_ids, again.output_ids[: len(turn.output_ids)])

    go(sglang_server, main)


async def _fresh(engine, lm, turn):
    await sync(lm, engine, 2)
    return await engine.generate(ask("again", CONTEXT, seed=turn.seed, max_new_tokens=220, ignore_eos=True))


def test_an_abort_ends_no_other_request(sglang_server, lm):
    """SGLang aborts every request whose id begins with the one given."""

    async def main(engine):
        await ready(engine, lm)
        longest = [200, *[40] * 10]  # four run at a time: when the first has 80 tokens, the tenth has started
        tasks = [
            asyncio.create_task(engine.generate(ask(f"r-{i}", CONTEXT, max_new_tokens=count, ignore_eos=True)))
            for i, count in enumerate(longest, 1)
        ]
        await until_tokens(engine, 4 * 80 + 10)
        assert await engine.abort(["r-1"]) == 1
        assert [(await task).stop_reason for task in tasks] == ["abort", *["length"] * 10]

    go(sglang_server, main)


def test_memory_is_released_and_restored_by_parts(sglang_server, lm):
    async def main(engine):
        await ready(engine, lm)
        assert await engine.release({"kv_cache"}) == 1 << 29  # the server's own measurement
        late = asyncio.create_task(engine.generate(ask("late", CONTEXT)))
        await asyncio.sleep(0.05)
        assert not late.done() and engine.stats().waiting == 1
        assert await engine.restore({"kv_cache"}) == 1 << 29
        assert (await late).stop_reason in ("stop", "length")
        assert await engine.release({"weights", "kv_cache"}) == (1 << 30) + (1 << 29)
        assert await engine.release({"weights"}) == 0  # already
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("b", CONTEXT))
        await engine.restore({"weights"})
        ack = await sync(lm, engine, 1)  # a trainer on the same device uses this order: weights, sync, cache
        assert ack.read_back is True
        await engine.restore({"kv_cache"})
        assert set((await engine.generate(ask("c", CONTEXT))).versions) == {1}

    go(sglang_server, main)


def test_restored_weights_are_used_only_after_their_sync(sglang_server, lm, other):
    """A request that was running when they were released waits for the sync, even after `restore`."""

    async def main(engine):
        await ready(engine, lm)
        running = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=200, ignore_eos=True)))
        await until_tokens(engine, 3)
        await engine.release({"weights", "kv_cache"})
        await asyncio.sleep(0.1)  # tokens may still be in transit
        num_tokens = engine.stats().decode_tokens
        await engine.restore({"weights", "kv_cache"})
        await asyncio.sleep(0.3)
        assert engine.stats().decode_tokens == num_tokens and not running.done()
        await sync(other, engine, 1)
        assert {*(await running).versions} == {0, 1} and len((await running).output_ids) == 200

    go(sglang_server, main)


def test_an_sglang_release_without_update_sessions_works(sglang_server, lm):
    async def main(engine):
        ack = await ready(engine, lm)
        assert ack.read_back is True and not engine._dialect.has_sessions
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {0}

    with broken(sglang_server, "", release="0.5.19"):
        go(sglang_server, main)


def test_weights_that_another_program_sent_are_detected(sglang_server, lm):
    """Another client's label is no version of this engine."""

    async def main(engine):
        await ready(engine, lm)
        body = {"new_version": "theirs", "abort_all_requests": False}
        post(sglang_server, "/update_weight_version", body)
        with pytest.raises(EngineFailure, match="theirs"):
            await engine.generate(ask("a", CONTEXT))

    go(sglang_server, main)


def test_state_that_a_dead_client_has_left_is_cleared(sglang_server, lm):
    post(sglang_server, "/pause_generation", {"mode": "retract"})
    post(sglang_server, "/begin_weight_update", {})

    async def main(engine):
        await ready(engine, lm)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {0}

    go(sglang_server, main)


def test_weights_of_the_model_folder_can_be_trusted_until_a_sync(sglang_server, lm, other):
    async def main(engine):
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        engine.trust_loaded_weights(5)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {5}
        await ready(engine, other, 6)
        with pytest.raises(StaleWeightsError):
            engine.trust_loaded_weights()

    go(sglang_server, main)


def test_parameters_that_sglang_interprets_differently_are_refused(sglang_server, lm):
    async def main(engine):
        await ready(engine, lm)
        with pytest.raises(CapabilityError, match="ignore_eos and stop_token_ids"):
            await engine.generate(ask("a", CONTEXT, ignore_eos=True, stop_token_ids=(7,)))
        with pytest.raises(CapabilityError, match="entropy"):
            await engine.generate(ask("a", CONTEXT, want=("entropy",)))

    go(sglang_server, main)


def test_a_server_that_does_not_fit_the_config_is_refused():
    info = {"version": "0.5.23", "tp_size": 2, "custom_weight_loader": [LOADER], "enable_deterministic_inference": True}
    info |= {"context_length": 256, "dtype": "float32"}
    require_fit(info, "sglang-0", True, 256, "float32")
    for change, expected in (
        ({"version": "0.5.8.post1"}, "0.5.19 or later"),
        ({"custom_weight_loader": []}, "--custom-weight-loader"),
        ({"enable_deterministic_inference": False}, "started without --enable-deterministic-inference"),
        ({"context_length": 255}, "start it with --context-length 256"),
        ({"dtype": "bfloat16"}, "model.dtype is float32"),
    ):
        with pytest.raises(ConfigError, match=expected):
            require_fit({**info, **change}, "sglang-0", True, 256, "float32")
    for version, has_sessions in (("0.5.23", True), ("0.5.19.post1", False)):
        dialect = SglangDialect(HttpClient("sglang-0"), {**info, "version": version}, "default")
        assert dialect.has_sessions == has_sessions and not dialect.capabilities.release
        asyncio.run(dialect.close())


def _event(total, ids, reason=None):
    pairs = [[-0.5, token, None] for token in ids]
    spans = [{"version": "run:3", "start": 0, "end": total}]
    meta = {"completion_tokens": total, "output_token_logprobs": pairs, "finish_reason": reason}
    return {
        "output_ids": ids,
        "prompt_token_ids": CONTEXT,
        "meta_info": meta | ({"weight_versions": spans} if reason else {}),
    }


def _parts(events):
    """The parts of these events, as the dialect reads them."""
    num_sampled = 0
    for event in events:
        part = part_of(event, num_sampled, "a")
        num_sampled += len(part.tokens)
        yield part


def _answer(stop=()):
    request = ask("a", CONTEXT, stop=stop)
    bounds = Bounds(stop_ids=frozenset(), limit=16, limit_reason="length")
    search = StopStrings(lambda: numbered_tokenizer(64)).search(request)
    return ServerAnswer(request, bounds, "SGLang", {"run:3": 3}, search)


@pytest.mark.parametrize(
    "events",
    [
        [
            _event(1, [5]),
            _event(3, [6, 7]),
            _event(3, [7], {"type": "abort"}),
        ],  # new tokens only; an abort repeats the last token
        [_event(1, [5]), _event(3, [5, 6, 7]), _event(3, [5, 6, 7], {"type": "abort"})],  # all tokens in each event
    ],
)
def test_every_token_counts_once(events):
    answer = _answer()
    assert [answer.add(part) for part in _parts(events)] == [1, 2, 0]
    turn = answer.turn("sglang-0")
    assert turn.output_ids.tolist() == [5, 6, 7] and turn.versions.tolist() == [3, 3, 3] and len(turn.logprobs) == 3


def test_tokens_after_a_stop_string_are_not_part_of_the_turn():
    """The server does not know the stop strings and samples until it gets the abort; its last event counts all its
    tokens."""
    answer = _answer(stop=("<6>",))
    events = [_event(1, [5]), _event(3, [6, 7]), _event(4, [6]), _event(4, [6], {"type": "abort"})]
    added = [(answer.add(part), answer.needs_abort) for part in _parts(events)]
    assert added == [(1, False), (1, True), (0, True), (0, False)]
    turn = answer.turn("sglang-0")
    assert turn.output_ids.tolist() == [5, 6] and turn.stop_reason == "stop"
    assert turn.versions.tolist() == [3, 3] and len(turn.logprobs) == 2


def test_lost_tokens_are_detected():
    with pytest.raises(EngineFailure, match="some are lost"):
        list(_parts([_event(1, [5]), _event(4, [8])]))


def test_a_reason_that_the_engine_does_not_know_is_an_engine_failure():
    """Also an abort with an error status: it gives no turn."""
    reason = {"type": "abort", "status_code": 503, "message": "out of memory"}
    with pytest.raises(EngineFailure, match="out of memory"):
        [_answer().add(part) for part in _parts([_event(1, [5], reason)])]


def test_an_abort_that_comes_after_the_end_changes_nothing():
    answer = _answer()
    for part in _parts([_event(1, [5], {"type": "stop"}), _event(1, [], {"type": "abort"})]):
        answer.add(part)
    assert answer.turn("sglang-0").stop_reason == "stop"
