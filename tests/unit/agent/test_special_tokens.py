"""Special tokens stay in the text of an answer, for agents and rewards; only those that end a turn are removed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_agent import scripted_context
from test_agents import CALL, USER, ScriptedPolicy, run
from tiny_run import write_run
from tiny_tokenizers import DROPS_THINKING, SHOWS_TOOLS, tiny_tokenizer

from meshrl import evaluate
from meshrl.agent.flatten import path_ids
from meshrl.agent.loop import MultiTurn, SingleTurn
from meshrl.core.types import Prompt, SamplingParams
from meshrl.data.chat import render
from meshrl.run.inputs import Objects, load_run
from meshrl.run.task import load_task, note_on_special, reward_workers

TAGS = ["<think>", "</think>", "<answer>", "<tool_call>", "</tool_call>"]


def tagged_tokenizer(template: str = SHOWS_TOOLS) -> Any:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS})
    return tokenizer


def context(tokenizer: Any, *further_stops: str) -> Any:
    stops = (tokenizer.eos_token_id, *map(tokenizer.convert_tokens_to_ids, further_stops))
    sampling = SamplingParams(stop_token_ids=stops)
    return scripted_context(tokenizer=tokenizer, sampling=sampling, max_new_tokens=200, max_context_tokens=4000)


class IdPolicy(ScriptedPolicy):
    """Samples the ids of each text, without a further stop token."""

    async def generate(self, request: Any) -> Any:
        self.stop_text = self.texts[len(self.requests)]
        pieces = self.tokenizer(self.stop_text, add_special_tokens=False).input_ids
        turn = await super().generate(request)
        turn.output_ids = np.array(pieces, np.int32)
        turn.logprobs, turn.versions = (np.zeros(len(pieces), kind) for kind in (np.float32, np.int32))
        return turn


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        ("<think>ab</think>12<|im_end|>", "<think>ab</think>12"),
        ("12</think><|im_end|>", "12</think>"),
        ("a<|im_start|>b<|bos|><|im_end|>", "a<|im_start|>b<|bos|>"),
        ("a<|im_end|>b<|endoftext|>c", "a<|im_end|>b<|endoftext|>c"),
        ("<answer>12<|im_end|><|endoftext|><|endoftext|>", "<answer>12"),
        ("12</answer>", "12</answer>"),
        ("ab<answer>", "ab"),
        ("<|im_end|>", ""),
        ("abz", "abz"),
    ],
    ids=["tags", "tag_last", "reserved", "ends_inside", "padding", "no_token", "own_stop", "end_only", "stop_is_text"],
)
def test_an_answer_has_its_special_tokens_without_the_end_of_its_turn(sampled: str, text: str):
    tokenizer = tagged_tokenizer()
    t = run(SingleTurn(), IdPolicy(tokenizer, sampled).generate, context(tokenizer, "<answer>", "z"))
    assert t.turns[0].messages[-1]["content"] == t.text == text and f"answer {text!r})" in repr(t)
    assert tokenizer.decode(t.turns[0].output_ids.tolist()) == sampled


@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["end_of_turn", "the_tag_is_a_stop_id"])
def test_a_call_in_special_tokens_is_executed(end: str):
    tokenizer = tagged_tokenizer()
    policy = IdPolicy(tokenizer, CALL + end, "12<|im_end|>")
    t = run(MultiTurn(), policy.generate, context(tokenizer, *[] if end else ["</tool_call>"]))
    assert t.turns[1].messages == [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "12"}]
    assert t.turns[1].parent == 0
    first = policy.requests[1].context_ids[: len(path_ids(t.turns, 0))]
    np.testing.assert_array_equal(first, path_ids(t.turns, 0))


def test_a_template_drops_thinking_between_special_tokens_from_the_history():
    tokenizer = tagged_tokenizer(DROPS_THINKING)
    policy = IdPolicy(tokenizer, "<think>ab</think>" + CALL + "<|im_end|>", "12<|im_end|>")
    t = run(MultiTurn(), policy.generate, context(tokenizer))
    assert [turn.parent for turn in t.turns] == [-1, -1]
    rendered = render(tokenizer, [USER, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "12"}])
    np.testing.assert_array_equal(policy.requests[1].context_ids, rendered)


def test_rewards_read_special_tokens_and_ids_and_the_start_states_what_is_removed(tmp_path: Path):
    config = write_run(tmp_path)
    tokenizer = tagged_tokenizer()
    cfg = load_run(config, []).config
    plain = load_task(cfg, Objects(), True)
    assert note_on_special(plain) is None  # only BOS, the ends of turns and what the template writes
    tokenizer.save_pretrained(tmp_path / "model")
    task = load_task(cfg, Objects(), True)
    note = note_on_special(task)
    assert note is not None and "\n" not in note and "removed (<|im_end|>, <|endoftext|>)" in note
    assert ", ".join(TAGS[:4]) + " and 1 more" in note and "<|im_start|>" not in note
    evaluated = evaluate(config, [f"data.eval_path={cfg.data.path}"], out=tmp_path / "evaluated", quiet=True)
    assert note in (evaluated.folder / "run_notes.txt").read_text()
    text = "<think>ab</think>12<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids

    def reads_text(completion: str, answer: Any, **rest: Any) -> float:
        return float(completion == "<think>ab</think>12" and sorted(rest)[-1] == "stop_reason")

    def reads_raw(completion: str, answer: Any, *, raw: str) -> float:
        return float(raw == completion + "<|im_end|>")

    def reads_tokens(solution_str: str, ground_truth: Any, tokens: list[int], **rest: Any) -> float:
        return float(tokens == ids and "raw" not in rest)

    rewards = {f.__name__: f for f in (reads_text, reads_raw, reads_tokens)}
    terms = {name: {"kind": f"given:{name}"} for name in rewards}
    cfg = cfg.model_copy(update={"reward": type(cfg.reward).model_validate({"terms": terms})})
    policy = IdPolicy(tokenizer, "ab<|im_end|>", text)
    trajectory = run(SingleTurn(), policy.generate, context(tokenizer))
    later = run(SingleTurn(), policy.generate, context(tokenizer), Prompt(id="p", ordinal=5, messages=[USER]))
    trajectory.turns += later.turns  # the last turn counts

    async def score() -> None:
        objects = Objects(rewards=rewards)
        async with reward_workers(cfg, objects, task, lambda _: None, lambda *_: None) as (scorer, trial):
            await trial
            await scorer.score([trajectory])

    asyncio.run(score())
    assert trajectory.rewards == dict.fromkeys(rewards, 1.0)
