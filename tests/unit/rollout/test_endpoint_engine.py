"""The endpoint engine: its requirements for a completions server, and weights that are sent as folders."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_servers import endpoint_client
from tiny_engines import ask, check_samples_from, layout_of, sync
from tiny_http import Refused, answering
from tiny_models import tiny_lm
from tiny_sync import Trainer
from tiny_sync import sync as sync_tensors
from vllm_servers import tiny_vllm_lm

from meshrl.core.errors import (
    CapabilityError,
    EngineFailure,
    RequestError,
    StaleWeightsError,
    UnloadedParamsError,
)
from meshrl.rollout.completions import FolderWeights, only_model
from meshrl.rollout.server.weights import ServerWeights
from meshrl.sync.layout import make_layout
from meshrl.sync.receiver import describe

CONTEXT = list(range(10, 30))

pytestmark = pytest.mark.timeout(400)  # the server's start is part of the first test's time


@asynccontextmanager
async def connected(server, **changes):
    """An engine for the server."""
    engine = endpoint_client(*server, **changes)
    try:
        yield engine
    finally:
        await engine.close()


class Answers:
    """A completions server that computes nothing. change: of its choice. reload: its answer to a new folder."""

    def __init__(self, change=None, reload=None):
        self.change, self.reload, self.seeds = change or {}, reload, []

    async def __call__(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": "model"}]}
        if path == "/update_weights_from_disk":
            if self.reload is None:
                raise Refused(500, "something broke in here")
            return self.reload
        self.seeds.append(body["seed"])
        return self.events(body)

    async def events(self, body):
        choice = {"text": "", "token_ids": [5], "prompt_token_ids": body["prompt"], "finish_reason": "length"}
        yield {"choices": [choice | {"logprobs": {"token_logprobs": [-0.5]}} | self.change]}


@asynccontextmanager
async def scripted(answers, folder=Path("model"), **changes):
    """An engine for this server."""
    async with answering(answers) as url:
        engine = await asyncio.to_thread(endpoint_client, url, folder, **changes)
        try:
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        ({"prompt_token_ids": [10, *CONTEXT]}, RequestError, "sent 20 ids and echoed 21 ids"),
        ({"prompt_token_ids": None, "token_ids": []}, RequestError, "no ids at all"),
        ({"logprobs": None}, EngineFailure, "return_token_ids, logprobs"),
        ({"token_ids": None, "text": "five"}, EngineFailure, "text and no token ids"),
    ],
    ids=["echo", "no ids", "no logprobs", "text"],
)
async def test_a_server_that_returns_no_ids_or_logprobs_is_refused(change, error, expected):
    async with scripted(Answers(change)) as engine:
        engine.trust_loaded_weights()
        with pytest.raises(error, match=expected):
            await engine.generate(ask("a", CONTEXT, max_new_tokens=1))


async def test_a_continuation_is_sampled_with_another_seed():
    """A server may seed a generator for each request: the same seed would repeat the random numbers."""
    answers = Answers()
    async with scripted(answers) as engine:
        engine.trust_loaded_weights()
        await engine.generate(ask("a", CONTEXT, seed=3))
        await engine.generate(ask("b", CONTEXT, seed=3, prefix_output=np.array([5], np.int32)))
        assert answers.seeds[0] == 3 != answers.seeds[1]


@pytest.mark.parametrize(("reload", "expected"), [(None, "something broke in here"), ({}, "success")])
async def test_a_folder_that_is_not_loaded_ends_the_sync(reload, expected, tmp_path):
    lm = tiny_lm("qwen2")
    lm.save_pretrained(tmp_path)
    async with scripted(Answers(reload=reload), tmp_path) as engine:
        await engine.reconcile(layout_of(lm))
        with pytest.raises(EngineFailure, match=expected):
            await sync(lm, engine, 0)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))


async def test_a_folder_that_was_not_loaded_is_removed_with_the_next_one(tmp_path):
    """The server may still read the last folder that it loaded, so that one stays until then, too."""
    lm, answers = tiny_lm("qwen2"), Answers(reload={"success": True})
    model, versions = tmp_path / "model", tmp_path / "versions"
    lm.save_pretrained(model)
    async with scripted(answers, model, versions=versions) as engine:
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        answers.reload = None
        with pytest.raises(EngineFailure):
            await sync(lm, engine, 1)
        await engine.cancel()
        assert sorted(folder.name for folder in versions.iterdir()) == ["version_0", "version_1"]
        answers.reload = {"success": True}
        await sync(lm, engine, 2)
        assert [folder.name for folder in versions.iterdir()] == ["version_2"]


async def test_an_endpoint_without_folders_evaluates_but_does_not_train():
    async with scripted(Answers(), takes_folders=False) as engine:
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        engine.trust_loaded_weights()
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {0}
        with pytest.raises(CapabilityError, match="evaluation"):
            await engine.reconcile(layout_of(tiny_lm("qwen2")))


async def test_each_version_is_a_folder_that_loads(endpoint_server, tmp_path):
    """SGLang takes the last folder as the name of its model, also for the next client."""
    lm, other = tiny_vllm_lm(), tiny_vllm_lm(seed=1)
    async with connected(endpoint_server, versions=tmp_path) as engine:
        await engine.reconcile(layout_of(lm))
        ack = await sync(lm, engine, 0)
        assert ack.wire and ack.read_back is None  # the parameters of such a server can't be read back
        await sync(other, engine, 1)
        assert set((await check_samples_from(engine, other, CONTEXT, "a")).versions) == {1}
    assert [folder.name for folder in tmp_path.iterdir()] == ["version_1"]  # the earlier one was removed
    loaded = type(other).from_pretrained(tmp_path / "version_1").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in other.state_dict().items())
    async with connected(endpoint_server) as engine:
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        await check_samples_from(engine, lm, CONTEXT, "a")


async def test_a_folder_that_the_server_can_t_load_is_refused_and_the_server_lives(endpoint_server, tmp_path):
    lm = tiny_vllm_lm()
    async with connected(endpoint_server) as engine:
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        with pytest.raises(RequestError, match="/update_weights_from_disk"):
            await engine._dialect._reload(tmp_path / "nothing")
        await check_samples_from(engine, lm, CONTEXT, "a")


async def test_a_sync_waits_for_running_requests(endpoint_server):
    """The version of each token is known only because weights do not change while a request runs."""
    lm, other = tiny_vllm_lm(), tiny_vllm_lm(seed=1)
    async with connected(endpoint_server) as engine:
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=400, ignore_eos=True)))
        while engine.stats().decode_tokens < 3:
            await asyncio.sleep(0.001)
        await sync(other, engine, 1)
        assert task.done() and set((await task).versions) == {0} and len((await task).output_ids) == 400


class Reloads(list):
    async def __call__(self, folder: Path) -> None:
        self.append(folder)


def test_tensors_of_several_dtypes_are_aligned_in_one_file(tmp_path):
    tensors = {
        "a": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "b": torch.randn(5, 3),
        "c": torch.randn(7).bfloat16(),
        "d": torch.randn(0, 4),
    }
    model, reloads = tmp_path / "model", Reloads()
    model.mkdir()
    save_file({name: torch.zeros_like(t) for name, t in tensors.items()}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "none"}))
    weights = ServerWeights(FolderWeights(model, tmp_path / "versions", reloads, "endpoint-0").call, "endpoint-0")
    layout = make_layout(describe(tensors), transfer_bytes=16)

    asyncio.run(weights.reconcile(layout))
    sync_tensors(Trainer(layout, keep_base=False), weights, tensors)
    with pytest.raises(UnloadedParamsError, match="b"):
        asyncio.run(weights.reconcile(make_layout({"a": ((3,), "uint8")})))
    weights.close()
    (folder,) = reloads
    loaded = load_file(folder / "model-00001.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], t) for name, t in tensors.items())
    assert (folder / "config.json").is_file()


def test_a_model_must_be_named_if_there_are_several():
    assert only_model({"data": [{"id": "m"}]}, "url") == "m"
    with pytest.raises(EngineFailure, match=r"a, b.*rollout\.endpoint\.model"):
        only_model({"data": [{"id": "a"}, {"id": "b"}]}, "url")
