"""Prompts with images in agents: each context has the placeholders of its images, and the spans that cover them."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
from scripted_agent import scripted_context
from tiny_vision import drawing, make_vision_folder

from meshrl.agent.flatten import flatten, path_ids
from meshrl.agent.loop import MultiTurn, SingleTurn, next_context, prompt_ids, start_trajectory, take_turn
from meshrl.agent.tools import Tool
from meshrl.config.data import DataConfig
from meshrl.core.errors import DataError
from meshrl.core.types import Request, SamplingParams, Trajectory, Turn
from meshrl.data.chat import load_tokenizer
from meshrl.data.datasets import PromptMaker, load_prompts
from meshrl.data.processor import load_vision
from meshrl.data.tables import RowTable

# Without the thinking of earlier answers, as Qwen3 renders them, so that a second context is rendered again.
FORGETS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content.split('</think>')[-1] if not loop.last else m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
QUESTION = {"question": "<image>ab<image>12", "images": [drawing(28, 28), drawing(56, 28)]}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = make_vision_folder(tmp_path_factory.mktemp("model"), template=FORGETS)
    tokenizer = load_tokenizer(folder)
    make = PromptMaker(DataConfig(answer=None), tokenizer, vision=load_vision(str(folder), tokenizer, 0))
    (prompt,), _ = load_prompts(RowTable("data", [QUESTION]), make)
    return tokenizer, prompt, make.vision.placeholder


class Answers:
    """A sampler that gives these texts."""

    def __init__(self, tokenizer, *texts: str):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), list[Request]()

    async def generate(self, request: Request) -> Turn:
        text = self.texts[len(self.requests)]
        self.requests.append(request)
        ids = np.array([*self.tokenizer(text, add_special_tokens=False).input_ids, 2], np.int32)
        made = {"logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
        return Turn(context_ids=request.context_ids, output_ids=ids, stop_reason="stop", **made)


def context(tokenizer):
    return scripted_context(tokenizer=tokenizer, sampling=SamplingParams(stop_token_ids=(2,)), max_context_tokens=4000)


def looks(result: str) -> MultiTurn:
    def look() -> str:
        return result

    return MultiTurn([Tool(name="look", description="", parameters={"type": "object"}, function=look)])


def require_spans(request: Request, placeholder: int) -> None:
    places = [np.arange(start, start + size) for _, start, size in request.media_spans]
    assert np.concatenate(places).tolist() == np.flatnonzero(request.context_ids == placeholder).tolist()
    assert [name for name, _, _ in request.media_spans] == ["image-0", "image-1"]


def test_a_single_turn_sends_ids_images_and_spans(case):
    tokenizer, prompt, placeholder = case
    sampler = Answers(tokenizer, "3")
    t = asyncio.run(SingleTurn().run(prompt, 0, sampler.generate, context(tokenizer)))
    (request,) = sampler.requests
    assert request.context_ids is prompt.ids and request.media_spans == prompt.media_spans
    require_spans(request, placeholder)
    sent = pickle.loads(pickle.dumps(request))
    assert {name: media.outputs["pixel_values"].shape for name, media in sent.media.items()} == {
        "image-0": (4, 1176),
        "image-1": (8, 1176),
    }
    t.reward = 1.0
    (sample,), _ = flatten([t])
    assert sample.media_spans == prompt.media_spans and [*sample.media] == ["image-0", "image-1"]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_conversation_with_tools_keeps_its_images(case, thinks: bool):
    """thinks: the template drops the thinking later, so that the context is rendered again."""
    tokenizer, prompt, placeholder = case
    sampler = Answers(tokenizer, ("1</think>" if thinks else "") + CALL, "12")
    t = asyncio.run(looks("ab").run(prompt, 0, sampler.generate, context(tokenizer)))
    assert len(sampler.requests) == 2
    for request in sampler.requests:
        require_spans(request, placeholder)
    second = t.turns[1]
    assert second.parent == (-1 if thinks else 0)
    assert len(second.media_spans) == (2 if thinks else 0), "spans of the parent's tokens belong to the parent"
    t.reward = 1.0
    samples, _ = flatten([t])
    for sample in samples:
        assert [sample.tokens[start] for _, start, _ in sample.media_spans] == [placeholder] * 2


def test_an_answer_of_a_tool_with_a_token_of_images_is_an_error_for_the_model(case):
    tokenizer, prompt, _ = case
    sampler = Answers(tokenizer, CALL, "12")
    t = asyncio.run(looks("see <|image_pad|>").run(prompt, 0, sampler.generate, context(tokenizer)))
    assert t.turns[1].messages[0]["content"] == "error: the answer has a token that stands for an image"
    assert t.status == "done"


def test_a_context_that_lacks_an_image_is_an_error(case):
    tokenizer, prompt, placeholder = case
    cut = np.delete(prompt.ids, np.flatnonzero(prompt.ids == placeholder)[:1])
    trajectory: Trajectory = start_trajectory(prompt, 0, context(tokenizer))
    with pytest.raises(DataError, match="it has 2 placeholders of images, but its 2 images have 3 features"):
        asyncio.run(take_turn(trajectory, cut, Answers(tokenizer, "1").generate, context(tokenizer)))


def test_an_image_in_a_new_message_is_an_error(case):
    tokenizer, prompt, _ = case
    ctx, sampler = context(tokenizer), Answers(tokenizer, "1")
    trajectory = start_trajectory(prompt, 0, ctx)
    ids = prompt_ids(prompt, tokenizer, [])

    async def two_turns() -> None:
        await take_turn(trajectory, ids, sampler.generate, ctx)
        new = [{"role": "user", "content": [{"type": "image", "image": "image-0"}]}]
        await take_turn(trajectory, next_context(trajectory, new, ctx), sampler.generate, ctx, new)

    with pytest.raises(DataError, match="placeholders of images"):
        asyncio.run(two_turns())
    assert len(path_ids(trajectory.turns, 0)) > len(ids)
