"""The SGLang engine without SGLang: its checks, and events and answers that a real server can't be made to send."""

import asyncio
import base64
import copy
import pickle
from contextlib import asynccontextmanager

import numpy as np
import pytest
from sglang_servers import FACTS
from tiny_engines import ask, deliveries, layout_of, sync
from tiny_http import Refused, answering
from tiny_models import tiny_lm
from tiny_tokenizers import numbered_tokenizer

from meshrl.core.errors import CapabilityError, ConfigError, EngineFailure, RequestError, StaleWeightsError, SyncError
from meshrl.rollout.admission import Bounds
from meshrl.rollout.server.answer import ServerAnswer
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.http import HttpClient
from meshrl.rollout.sglang.dialect import LOADER, SglangDialect, part_of, require_fit
from meshrl.rollout.sglang.loader import load
from meshrl.rollout.stop_strings import StopStrings
from meshrl.sync.layout import SyncHeader

CONTEXT = list(range(10, 30))


async def ready(engine, lm, version=0):
    await engine.reconcile(layout_of(lm))
    return await sync(lm, engine, version)


INFO = {
    "version": "0.5.23",
    "tp_size": 2,
    "custom_weight_loader": [LOADER],
    "enable_deterministic_inference": True,
    "max_req_input_len": 256,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("asked", "deterministic", "expected"),
    [
        ({"ignore_eos": True, "stop_token_ids": (7,)}, True, "ignore_eos and stop_token_ids"),
        ({"want": ("entropy",)}, True, "entropy"),
        ({"min_p": 0.1}, True, r"rollout\.sglang\.deterministic=false"),
        ({"min_p": 0.1}, False, None),
    ],
)
async def test_parameters_that_sglang_interprets_differently_are_refused(asked, deterministic, expected):
    info = {**INFO, "enable_deterministic_inference": deterministic}
    engine = ServerEngine(SglangDialect(HttpClient("sglang-0", "http://127.0.0.1:9"), info, "default"), **FACTS)
    engine.trust_loaded_weights()
    error = EngineFailure if expected is None else CapabilityError  # sent, and no server answers
    with pytest.raises(error, match=expected or "interrupted"):
        await engine.generate(ask("a", CONTEXT, **asked))


def test_a_server_that_does_not_fit_the_config_is_refused():
    require_fit(INFO, "sglang-0", True, 256, "float32")
    for change, expected in (
        ({"version": "0.5.8.post1"}, r"0\.5\.23 or later"),
        ({"custom_weight_loader": []}, "--custom-weight-loader"),
        ({"enable_deterministic_inference": False}, "started without --enable-deterministic-inference"),
        ({"max_req_input_len": 255}, "--context-length 262"),
        ({"dtype": "bfloat16"}, "model.dtype is float32"),
    ):
        with pytest.raises(ConfigError, match=expected):
            require_fit({**INFO, **change}, "sglang-0", True, 256, "float32")


def _event(total, ids, reason=None, context=CONTEXT, label="run:3"):
    """Each token has a logprob of its own."""
    pairs = [[-token / 100, token, None] for token in ids]
    spans = [{"version": label, "start": 0, "end": total}]
    meta = {"completion_tokens": total, "output_token_logprobs": pairs, "finish_reason": reason}
    return {
        "output_ids": ids,
        "prompt_token_ids": context,
        "meta_info": meta | ({"weight_versions": spans} if reason else {}),
    }


def _parts(events):
    """The parts of these events, as the dialect reads them."""
    num_sampled = 0
    for event in events:
        part = part_of(event, num_sampled, "a")
        num_sampled += len(part.tokens)
        yield part


def _answer(stop=(), limit=16, limit_reason="length"):
    request = ask("a", CONTEXT, stop=stop)
    bounds = Bounds(stop_ids=frozenset(), limit=limit, limit_reason=limit_reason)
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
    assert turn.output_ids.tolist() == [5, 6, 7] and turn.versions.tolist() == [3, 3, 3]
    np.testing.assert_allclose(turn.logprobs, [-0.05, -0.06, -0.07])


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


@pytest.mark.parametrize(
    ("limit", "limit_reason", "expected"),
    [(1, "length", "length"), (1, "context", "context"), (2, "length", "context")],
)
def test_the_end_of_the_context_is_not_the_limit_of_the_answer(limit, limit_reason, expected):
    """The server has one reason, length, for both. One that reserves positions ends before the limit."""
    answer = _answer(limit=limit, limit_reason=limit_reason)
    for part in _parts([_event(1, [5], {"type": "length"})]):
        answer.add(part)
    assert answer.turn("sglang-0").stop_reason == expected


def test_an_abort_that_comes_after_the_end_changes_nothing():
    answer = _answer()
    for part in _parts([_event(1, [5], {"type": "stop"}), _event(1, [], {"type": "abort"})]):
        answer.add(part)
    assert answer.turn("sglang-0").stop_reason == "stop"


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        ({"prompt_token_ids": [CONTEXT[0], *CONTEXT]}, RequestError, "sent 20 ids and echoed 21 ids"),
        ({"meta_info": {"output_token_logprobs": []}}, EngineFailure, "and 0 logprobs"),
        ({"meta_info": {"output_token_logprobs": [[-0.5, 6, None]]}}, EngineFailure, "logprobs of other tokens"),
    ],
    ids=["echo", "no logprobs", "other logprobs"],
)
def test_an_incomplete_answer_is_refused(change, error, expected):
    """The trainer never gets ids that were changed by a template, or logprobs of other tokens."""
    event = _event(1, [5])
    event |= change | {"meta_info": event["meta_info"] | change.get("meta_info", {})}
    with pytest.raises(error, match=expected):
        [_answer().add(part) for part in _parts([event])]


class Script:
    """A server that answers like SGLang and computes nothing. Its workers run meshrl's loader with a model that has
    SGLang's `load_weights`. silent: number of workers that write no answer. label: its only label. breaks: its streams
    are interrupted. flushes: drops its cache."""

    def __init__(self, lm, silent=0, label=None, breaks=False, flushes=True):
        self.model, self.silent, self.label = copy.deepcopy(lm), silent, label
        self.breaks, self.flushes = breaks, flushes
        self.model.requires_grad_(False)
        self.served, self.is_open, self.is_paused = label or "default", False, False
        self.num_aborts, self.aborted = 0, asyncio.Event()
        self.released: set[str] = set()
        params = dict(self.model.named_parameters())
        self.model.load_weights = lambda pairs: [params[name].copy_(tensor) for name, tensor in pairs]

    async def __call__(self, path, body):
        if path in ("/begin_weight_update", "/end_weight_update"):
            if self.is_open == path.startswith("/begin"):
                raise Refused(400, "an update is already open, or none")
            self.is_open = not self.is_open
        elif path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path.startswith("/pause")
            if (self.is_open or self.released) and not self.is_paused:
                raise Refused(400, "requests would run during an update, or without memory")
        elif path == "/release_memory_occupation":
            self.released |= set(body["tags"])
        elif path == "/resume_memory_occupation":
            self.released -= set(body["tags"])
        elif path == "/update_weights_from_tensor":
            if not self.is_open:
                raise Refused(400, "no update is open")
            for payload in body["serialized_named_tensors"][self.silent :]:
                load(self.model, pickle.loads(base64.b64decode(payload)))
            self.served = self.label or body.get("weight_version") or self.served
            if body["flush_cache"] and (not self.flushes or "kv_cache" in self.released):
                raise Refused(400, "the cache was not flushed")
        elif path == "/update_weight_version":
            self.served = body["new_version"]
        elif path == "/model_info":
            return {"weight_version": self.served}
        elif path == "/generate" and body.get("stream"):
            return self.events(body)
        elif path == "/abort_request":
            self.num_aborts += 1
            if self.num_aborts == 3:  # the request had not reached the scheduler before
                self.aborted.set()
        return {}

    async def events(self, body):
        yield _event(1, [5])
        if self.breaks:
            raise ConnectionError
        await self.aborted.wait()
        yield _event(1, [], {"type": "abort"})


class Counting(Script):
    """Answers a request that begins with n by 18 tokens n, n + 1, ... in three events. The second one waits for
    `goes_on`."""

    def __init__(self, lm):
        super().__init__(lm)
        self.goes_on = asyncio.Event()
        self.rids: list[str] = []

    async def events(self, body):
        self.rids.append(body["rid"])
        context, spans = body["input_ids"], []
        for start, end in ((0, 1), (1, 17), (17, 18)):
            if start == 1:
                await self.goes_on.wait()
            spans.append({"version": self.served, "start": start, "end": end})
            reason = {"type": "length"} if end == 18 else None
            event = _event(end, [context[0] + i for i in range(start, end)], reason, context)
            event["meta_info"]["weight_versions"] = spans
            yield event


@asynccontextmanager
async def scripted(script, tp_size=1):
    """An engine for this server."""
    async with answering(script) as url:
        info = INFO | {"tp_size": tp_size, "enable_memory_saver": True}
        engine = ServerEngine(SglangDialect(HttpClient("sglang-0", url), info, "run:3"), **FACTS)
        try:
            yield engine
        finally:
            await engine.close()


async def test_every_update_is_ended_before_the_server_samples_again():
    lm = tiny_lm("qwen2")
    script = Script(lm)
    script.is_open = True  # a client that has ended has left it open
    async with scripted(script) as engine:
        for version in (0, 1):
            assert (await ready(engine, lm, version)).read_back is True
            assert not script.is_open
        layout = layout_of(lm)
        await engine.begin(SyncHeader(version=2, layout_hash=layout.hash))
        await engine.receive(next(iter(deliveries(lm, layout))))
        await engine.cancel()
        assert not script.is_open and script.served == "mixed"


async def test_each_token_has_its_own_logprob_and_the_version_that_sampled_it():
    """Also if two requests run at the same time, and new weights arrive in between. A mistake is not visible in a run:
    the ratios of the loss are wrong, and no value is unusual."""
    lm = tiny_lm("qwen2")
    script = Counting(lm)
    async with scripted(script) as engine:
        await ready(engine, lm)
        asked = [ask(str(n), [n, 7], max_new_tokens=18, ignore_eos=True) for n in (3, 30)]
        tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
        while engine.stats().decode_tokens < 2:
            await asyncio.sleep(0.001)
        await sync(lm, engine, 1)
        script.goes_on.set()
        for n, turn in zip((3, 30), await asyncio.gather(*tasks), strict=True):
            assert turn.output_ids.tolist() == list(range(n, n + 18)) and turn.stop_reason == "length"
            np.testing.assert_allclose(turn.logprobs, -turn.output_ids / 100, rtol=1e-6)
            assert turn.versions.tolist() == [0] + [1] * 17


async def test_labels_of_another_client_are_no_versions_of_this_one():
    """Also if both count their versions in the same way: it has other weights."""
    lm = tiny_lm("qwen2")
    script = Counting(lm)
    script.goes_on.set()
    async with scripted(script) as engine:
        await ready(engine, lm)
    async with scripted(script) as engine:
        theirs = script.served
        await ready(engine, lm)
        assert set((await engine.generate(ask("a", CONTEXT, max_new_tokens=18))).versions) == {0}
        script.served = theirs
        with pytest.raises(EngineFailure, match=theirs):
            await engine.generate(ask("b", CONTEXT, max_new_tokens=18))


async def test_a_label_that_the_server_does_not_take_ends_the_sync():
    lm = tiny_lm("qwen2")
    async with scripted(Script(lm, label="old")) as engine:
        with pytest.raises(SyncError, match=r"labelled .*, and SGLang has 'old'"):
            await ready(engine, lm)


async def test_a_cache_that_is_not_dropped_ends_the_sync():
    lm = tiny_lm("qwen2")
    async with scripted(Script(lm, flushes=False)) as engine:
        with pytest.raises(RequestError, match="cache was not flushed"):
            await ready(engine, lm)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))


async def test_a_worker_that_does_not_answer_is_named():
    lm = tiny_lm("qwen2")
    async with scripted(Script(lm, silent=1), tp_size=2) as engine:
        with pytest.raises(EngineFailure, match=r"workers \[0\] of 2 did not answer reconcile"):
            await engine.reconcile(layout_of(lm))


async def test_a_stream_that_breaks_is_an_engine_failure():
    """No request is repeated: the second sample would have the same seed and count as another one."""
    async with scripted(Script(tiny_lm("qwen2"), breaks=True)) as engine:
        engine.trust_loaded_weights()
        with pytest.raises(EngineFailure, match=r"interrupted|without its closing event"):
            await engine.generate(ask("a", CONTEXT))
        assert engine.stats().running == 0


async def test_an_abort_is_repeated_until_the_late_answer_ends():
    async with scripted(Script(tiny_lm("qwen2"))) as engine:
        engine.trust_loaded_weights()
        task = asyncio.create_task(engine.generate(ask("a", CONTEXT)))
        while engine.stats().decode_tokens < 1:
            await asyncio.sleep(0.001)
        assert await engine.abort() == 1
        turn = await task
        assert turn.stop_reason == "abort" and turn.output_ids.tolist() == [5]


async def test_a_server_stays_paused_until_its_restored_weights_have_values():
    lm = tiny_lm("qwen2")
    script = Script(lm)
    async with scripted(script) as engine:
        await ready(engine, lm)
        await engine.release({"weights"})
        await engine.restore({"weights"})
        assert script.is_paused
        await sync(lm, engine, 1)
        assert not script.is_paused


async def test_nothing_reaches_a_server_without_its_cache():
    """A trainer on the same device restores the weights, syncs, and restores the cache last."""
    lm = tiny_lm("qwen2")
    script = Counting(lm)
    script.goes_on.set()
    async with scripted(script) as engine:
        await ready(engine, lm)
        await engine.release({"weights", "kv_cache"})
        await engine.restore({"weights"})
        await sync(lm, engine, 1)
        task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=18)))
        await asyncio.sleep(0.05)
        assert not task.done() and engine.stats().waiting == 1
        await engine.restore({"kv_cache"})
        assert set((await task).versions) == {1}


async def test_no_id_of_a_request_begins_with_another_one():
    """SGLang aborts every request whose id begins with the one given."""
    lm = tiny_lm("qwen2")
    script = Counting(lm)
    script.goes_on.set()
    async with scripted(script) as engine:
        await ready(engine, lm)
        await asyncio.gather(
            *(engine.generate(ask(str(n), [n, 7], max_new_tokens=18, ignore_eos=True)) for n in range(1, 13))
        )
    names = script.rids
    assert len(set(names)) == 12
    assert [(a, b) for a in names for b in names if a != b and a.startswith(b)] == []
