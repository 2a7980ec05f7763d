"""vLLM samples with images: it gets the arrays of the image processor, never an image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import ask, layout_of, sync
from vision_families import IMAGE, config_of, media_ids, reference_logprobs, row, tiny_vision_lm
from vllm_servers import (
    NO_VISION,
    PROCESSORS,
    client_of,
    save_processor,
    serving,
    vllm_vision_family,
)

from meshrl.core.errors import CapabilityError, DataError, RequestError
from meshrl.core.types import Request, Sample, Turn
from meshrl.model.inputs import ModelInputs
from meshrl.rollout.admission import bounds_of
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.server.http import HttpClient
from meshrl.rollout.server.process import ServerProcess
from meshrl.rollout.vllm.dialect import VllmDialect
from meshrl.rollout.vllm.features import EncodedImages, array_of

pytestmark = pytest.mark.timeout(600)  # a server takes a minute to start, or longer on a busy machine
SIZES = ((16, 24), (24, 8))
PROMPTS: dict[str, list[Any]] = {
    "text": [7],
    "image": [3, (SIZES[0], 1), 4],
    "another image": [3, (SIZES[0], 2), 4],  # of the same size, so the ids are the same
    "next to each other": [(SIZES[1], 1), (SIZES[0], 1), 5],
    "two": [2, (SIZES[0], 1), 3, (SIZES[1], 3), 2],
}


@pytest.fixture(scope="module", params=PROCESSORS)
def family(request: pytest.FixtureRequest) -> str:
    if NO_VISION:
        pytest.skip(NO_VISION)
    return str(request.param)


@pytest.fixture(scope="module")
def name(family: str) -> str:
    return vllm_vision_family(family)


@pytest.fixture(scope="module")
def server(family: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("images")
    save_processor(family, folder)
    with serving(tiny_vision_lm(name), folder) as process:
        yield process


async def synced(server: ServerProcess, lm: Any) -> ServerEngine:
    engine = client_of(server, inputs=ModelInputs(lm.config))
    await engine.reconcile(layout_of(lm))
    ack = await sync(lm, engine, 0)
    assert ack.read_back  # every parameter, those of the tower, too
    return engine


def asked(name: str, sample: Sample, **changes: Any) -> Request:
    media = {"media": sample.media, "media_spans": sample.media_spans}
    return ask(name, sample.tokens, **{"temperature": 0.0, "ignore_eos": True, **media, **changes})


def logprobs_after(name: str, lm: Any, prompt: list[Any], turn: Turn) -> torch.Tensor:
    """[R, V], by Transformers' own forward, at the positions of the turn's tokens."""
    full = row(name, "r", prompt, 0)
    full.tokens = np.concatenate([full.tokens, turn.output_ids])
    with torch.no_grad():
        return reference_logprobs(name, lm, full)[len(turn.context_ids) - 1 : -1]


def check(name: str, lm: Any, prompt: list[Any], turn: Turn, first: int = 0) -> float:
    """The largest difference of the logprobs of a greedy turn from token `first` on."""
    expected = logprobs_after(name, lm, prompt, turn)[first:]
    tokens = torch.from_numpy(turn.output_ids[first:]).long()
    assert tokens.tolist() == expected.argmax(-1).tolist()
    return float((expected.gather(1, tokens[:, None])[:, 0] - torch.from_numpy(turn.logprobs[first:])).abs().max())


@pytest.mark.slow
async def test_answers_and_logprobs_are_those_of_transformers(server: ServerProcess, name: str):
    lm = tiny_vision_lm(name)
    engine = await synced(server, lm)
    requests = [asked(kind, row(name, "r", prompt, 0)) for kind, prompt in PROMPTS.items()]
    turns = await asyncio.gather(*map(engine.generate, requests))
    found = {kind: check(name, lm, PROMPTS[kind], turn) for kind, turn in zip(PROMPTS, turns, strict=True)}
    assert max(found.values()) < 5e-6, found
    assert turns[1].context_ids.tolist() == turns[2].context_ids.tolist()
    assert abs(turns[1].logprobs[0] - turns[2].logprobs[0]) > 1e-3


@pytest.mark.slow
async def test_no_placeholder_is_sampled(server: ServerProcess, name: str):
    """Their rows of the head are the largest; the trainer's head has them masked, too."""
    lm = tiny_vision_lm(name)
    with torch.no_grad():
        lm.lm_head.weight[media_ids(lm.config)] *= 30
    engine = await synced(server, lm)
    prompt = PROMPTS["image"]
    turn = await engine.generate(asked("a", row(name, "r", prompt, 0), temperature=1.0, max_new_tokens=200))
    assert not set(media_ids(lm.config)) & set(turn.output_ids.tolist())
    expected = logprobs_after(name, lm, prompt, turn).gather(1, torch.from_numpy(turn.output_ids).long()[:, None])
    np.testing.assert_allclose(turn.logprobs, expected[:, 0], atol=2e-5)


@pytest.mark.slow
async def test_a_sync_replaces_the_features_of_images_also_of_running_requests(server: ServerProcess, name: str):
    """The other model differs in its tower alone, so that a feature of the old weights would be seen."""
    lm, other = tiny_vision_lm(name), tiny_vision_lm(name)
    with torch.no_grad():
        for parameter in other.model.visual.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    engine, prompt = await synced(server, lm), PROMPTS["two"]
    assert check(name, lm, prompt, await engine.generate(asked("a", row(name, "r", prompt, 0)))) < 5e-6
    for version in range(1, 11):  # on a busy machine the turn may be finished before the sync begins
        now, before = (other, lm)[(version + 1) % 2], engine.stats().decode_tokens
        running = asked(f"running {version}", row(name, "r", prompt, 0), max_new_tokens=800)
        task = asyncio.create_task(engine.generate(running))
        while engine.stats().decode_tokens < before + 3:
            await asyncio.sleep(0.001)
        assert (await sync(now, engine, version)).read_back
        turn = await task
        if turn.versions[0] < turn.versions[-1]:
            break
    first = int(np.argmax(turn.versions == version))
    assert 0 < first < len(turn.versions)
    assert check(name, now, prompt, turn, first) < 1e-4
    assert check(name, now, prompt, await engine.generate(asked("b", row(name, "r", prompt, 0)))) < 5e-6


@pytest.mark.slow
async def test_other_placeholders_than_features_are_refused(server: ServerProcess, name: str):
    engine, sample = await synced(server, tiny_vision_lm(name)), row(name, "r", PROMPTS["image"], 0)
    sample.tokens = np.where(sample.tokens == IMAGE, 5, sample.tokens)
    with pytest.raises(RequestError, match="has 6 features, but 0 placeholder tokens"):
        await engine.generate(asked("a", sample))


async def test_an_image_is_encoded_once_for_the_samples_of_its_prompt():
    calls: list[dict[str, Any]] = []

    async def encode(arrays: dict[str, Any]) -> str:
        calls.append(arrays)
        await asyncio.sleep(0)
        return f"text {len(calls)}"

    inputs = ModelInputs(config_of("qwen2_vl"))
    images, sample = EncodedImages(inputs, encode), row("qwen2_vl", "r", PROMPTS["two"], 0)
    found = await asyncio.gather(*(images.features(asked(str(i), sample)) for i in range(4)))
    assert all(features["kwargs_data"] == {"image": ["text 1", "text 2"]} for features in found)
    assert found[0]["mm_placeholders"] == {"image": [{"offset": 3, "length": 6}, {"offset": 14, "length": 3}]}
    first = sample.media[sample.media_spans[0][0]].outputs
    assert {name: array_of(values).tolist() for name, values in calls[0].items()} == {
        name: array.tolist() for name, array in first.items()
    }
    other = row("qwen2_vl", "r", PROMPTS["another image"], 0)
    other.media[other.media_spans[0][0]].num_tokens = 5
    with pytest.raises(DataError, match="5 placeholder tokens, but the model makes 6 features"):
        await images.features(asked("a", other))


async def test_a_family_whose_images_vllm_does_not_take_is_refused():
    dialect = VllmDialect(HttpClient("vllm"), None, True, ModelInputs(config_of("llava")))
    request = asked("a", row("llava", "r", [3, ((12, 12), 1), 2], 0))
    with pytest.raises(CapabilityError, match="vLLM takes text only with this model"):
        dialect.check(request, bounds_of(request, (), 100, 64))
