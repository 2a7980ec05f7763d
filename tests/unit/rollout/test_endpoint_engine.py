"""The endpoint engine: its requirements for a completions server, and weights that are sent as folders."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_servers import broken, endpoint_client
from tiny_engines import ask, layout_of, sync
from tiny_models import tiny_lm
from tiny_sync import Trainer
from tiny_sync import sync as sync_tensors

from meshrl.core.errors import (
    CapabilityError,
    EngineFailure,
    RequestError,
    StaleWeightsError,
    UnloadedParamsError,
)
from meshrl.rollout.completions import only_model
from meshrl.rollout.folder_weights import FolderWeights
from meshrl.rollout.server.weights import ServerWeights
from meshrl.sync.layout import make_layout
from meshrl.sync.receiver import describe

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
        engine = endpoint_client(url, **changes)
        try:
            await asyncio.wait_for(main(engine), 100)
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "error", "expected"),
    [
        ("wrong_echo", RequestError, "sent 20 ids and echoed 21 ids"),
        ("no_ids", RequestError, "no ids at all"),
        ("no_logprobs", EngineFailure, "return_token_ids, logprobs"),
    ],
)
def test_a_server_that_returns_no_ids_or_logprobs_is_refused(sglang_server, fault, error, expected):

    async def main(engine):
        engine.trust_loaded_weights()
        with broken(sglang_server, fault), pytest.raises(error, match=expected):
            await engine.generate(ask("a", CONTEXT))

    go(sglang_server, main)


def test_an_endpoint_without_folders_evaluates_but_does_not_train(sglang_server, lm):
    async def main(engine):
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))
        engine.trust_loaded_weights()
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {0}
        with pytest.raises(CapabilityError, match="evaluation"):
            await engine.reconcile(layout_of(lm))

    go(sglang_server, main, takes_folders=False)


def test_each_version_is_a_folder_that_loads(sglang_server, lm, other, tmp_path):
    async def main(engine):
        await engine.reconcile(layout_of(lm))
        ack = await sync(lm, engine, 0)
        assert ack.wire and ack.read_back is None  # the parameters of such a server can't be read back
        await sync(other, engine, 1)
        assert set((await engine.generate(ask("a", CONTEXT))).versions) == {1}

    go(sglang_server, main, versions=tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["version_1"]  # the earlier one was removed
    loaded = type(other).from_pretrained(tmp_path / "version_1").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("fault", ["error", "refused"])
def test_a_folder_that_is_not_loaded_ends_the_sync(sglang_server, lm, other, fault, tmp_path):
    changes = {"reload_url": "/nowhere"} if fault == "refused" else {}

    async def main(engine):
        await engine.reconcile(layout_of(lm))
        with (
            broken(sglang_server, fault, path="/update_weights_from_disk"),
            pytest.raises((EngineFailure, RequestError), match=changes.get("reload_url", "/update_weights_from_disk")),
        ):
            await sync(lm, engine, 0)
        with pytest.raises(StaleWeightsError):
            await engine.generate(ask("a", CONTEXT))

    go(sglang_server, main, versions=tmp_path, **changes)


def test_an_answer_other_than_success_is_no_success(sglang_server, lm):
    async def main(engine):
        await engine.reconcile(layout_of(lm))
        with broken(sglang_server, "empty_reload_answer"), pytest.raises(EngineFailure, match="success"):
            await sync(lm, engine, 0)

    go(sglang_server, main)


def test_a_sync_waits_for_running_requests(sglang_server, lm, other):
    """The version of each token is known only because weights do not change while a request runs."""

    async def main(engine):
        await engine.reconcile(layout_of(lm))
        await sync(lm, engine, 0)
        task = asyncio.create_task(engine.generate(ask("a", CONTEXT, max_new_tokens=100, ignore_eos=True)))
        while engine.stats().decode_tokens < 3:
            await asyncio.sleep(0.001)
        await sync(other, engine, 1)
        assert task.done() and set((await task).versions) == {0} and len((await task).output_ids) == 100

    go(sglang_server, main)


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
