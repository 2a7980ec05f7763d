"""What the package renderers reads in answers, as a program of its own Python. Standard input: a JSON list of [format,
answer, tools]. Output: for each, {content, reasoning, calls: [[status, name, arguments, raw], ...]}."""

import json
import re
import sys

from renderers import parsing

MARKS = re.compile(r"<\|[^|<>]+\|>|<｜[^｜<>]+｜>|</?(?:think|tool_call|arg_key|arg_value)>")
_IDS: dict[str, int] = {}


class Letters:
    """A tokenizer whose ids are special tokens, from 2^21 on, and single characters."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return _IDS.setdefault(token, (1 << 21) + len(_IDS))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids, at = list[int](), 0
        for mark in MARKS.finditer(text):
            ids += [*map(ord, text[at : mark.start()]), self.convert_tokens_to_ids(mark[0])]
            at = mark.end()
        return [*ids, *map(ord, text[at:])]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        of_ids = {i: token for token, i in _IDS.items()}
        return "".join(chr(i) if i < 1 << 21 else of_ids[i] for i in ids)


LETTERS = Letters()


def ids_of(**tokens: str) -> dict[str, int]:
    return {f"{name}_id": LETTERS.convert_tokens_to_ids(token) for name, token in tokens.items()}


THINK = {"think": "<think>", "think_end": "</think>"}
CALL = {"tool_call": "<tool_call>", "tool_call_end": "</tool_call>"}
END = {LETTERS.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|eot_id|>")}


def read(form: str, answer: str, tools: list[dict]) -> parsing.ParsedResponse:
    ids = LETTERS.encode(answer)
    if form == "hermes":
        of = ids_of(**CALL, reasoning_end="</think>")
        return parsing.parse_qwen3(LETTERS, ids, stop_ids=END, **of)
    if form == "xml":
        return parsing.parse_qwen35(LETTERS, ids, stop_ids=END, tools=tools, **ids_of(**THINK, **CALL))
    if form == "glm":
        of = ids_of(
            arg_key="<arg_key>", arg_key_end="</arg_key>", arg_value="<arg_value>", arg_value_end="</arg_value>"
        )
        return parsing.parse_glm(LETTERS, ids, stop_ids=END, tools=tools, **ids_of(**THINK, **CALL), **of)
    if form == "deepseek":
        names = ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep")
        of = ids_of(**{name: f"<｜{name.replace('_', '▁')}｜>" for name in names})
        return parsing.parse_deepseek_v3(LETTERS, ids, stop_ids=END, **of)
    if form == "gpt_oss":
        names = ("return", "call", "start", "end", "channel", "message", "constrain")
        return parsing.parse_gpt_oss(LETTERS, ids, **ids_of(**{name: f"<|{name}|>" for name in names}))
    return parsing.parse_llama_3(LETTERS, ids, stop_ids=END)


if __name__ == "__main__":
    answers = [read(*each) for each in json.load(sys.stdin)]
    calls = [[[c.status, c.name, c.arguments, c.raw] for c in answer.tool_calls] for answer in answers]
    json.dump(
        [{"content": a.content, "reasoning": a.reasoning_content, "calls": c} for a, c in zip(answers, calls)],
        sys.stdout,
    )
