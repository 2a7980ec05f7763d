"""The parts of a model's answer: its text, its reasoning and its tool calls.

Transformers' response templates divide the answer into regions. Each call is then read on its own: one that is
malformed does not lose the others, and one that is not closed is text.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.data.decode import ending_ids, text_of

_END = "\0"  # follows the text, so that a pattern for the end of a call never matches because the text is over
_FED_CHARS = 4096  # at once: each new region searches the text that was fed, so more takes quadratic time
_ID_CHARS = 9  # letters and digits of a call's id, as many as Mistral's templates require
_TEXT_VALUES = ("xml-inline", "kv-lines")  # forms whose values have no types; the tool's schema has them


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A closed call of an answer. id: of the context, the answer and the call's number. arguments: the JSON text of an
    object. error: why the call must not be executed; then `arguments` is what the model wrote, and name may be empty.
    """

    id: str
    name: str
    arguments: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """content: the text outside reasoning and calls. It has a call that is not closed."""

    content: str
    reasoning_content: str
    tool_calls: tuple[ToolCall, ...]

    def as_message(self, prefix: str = "") -> dict[str, Any]:
        """As a chat API returns it. A call without a name stays text. prefix: of the ids of calls, whose length stays:
        Mistral's template refuses other ones."""
        unnamed = [call.arguments for call in self.tool_calls if not call.name]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, [self.content, *unnamed]))}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if calls := [call for call in self.tool_calls if call.name]:
            ids = [(prefix + call.id)[:_ID_CHARS] for call in calls]
            message["tool_calls"] = [function_call(i, call.name, call.arguments) for i, call in zip(ids, calls)]
        return message


def function_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call as messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_value(arguments: Any) -> Any:
    """The arguments of a call: as values, where their text is JSON; a malformed call of the model stays a text."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def as_object(arguments: str) -> dict[str, Any]:
    """As values; a text that is no JSON object is the value of `malformed`."""
    value = as_value(arguments)
    return value if isinstance(value, dict) else {"malformed": arguments}


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message of `as_message` with the arguments of its calls as values, which templates want."""
    if "tool_calls" not in message:
        return message
    calls = [(call["id"], call["function"]) for call in message["tool_calls"]]
    return {**message, "tool_calls": [function_call(i, f["name"], as_object(f["arguments"])) for i, f in calls]}


def parse(
    tokenizer: Any,
    answer: np.ndarray | str,
    *,
    context: np.ndarray | str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    stop_ids: Collection[int] = (),
) -> ParsedAnswer:
    """The parts of one sampled answer, by the tokenizer's own `response_template`, else by the format in FORMATS that
    the chat template shows, else by that of Hermes.

    answer: the sampled ids, int32[R], or their text with all special tokens. Some formats end a call with a stop id.
    context: all that precedes the answer, as ids int32[C] or text with special tokens: it may begin the reasoning.
    tools: the JSON schemas in the prompt, which have the types of arguments; without any, the answer has no calls.
    stop_ids: the run's, which are removed from the end of the content with EOS and padding.

    Malformed calls raise nothing. Raises: DataError when the tokenizer's own response_template is invalid.
    """
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    text, before = (x if isinstance(x, str) else text_of(tokenizer, x, special=True) for x in (answer, context))
    spec, is_python = _response_template(tokenizer)
    try:
        regions = load_response_template(_regions(spec, with_calls=bool(tools)))
    except (ValueError, TypeError, KeyError) as cause:
        raise DataError(f"the response_template of {tokenizer.name_or_path!r} is invalid: {cause}") from cause
    parser = ResponseParser(regions, prefix=before if regions.start_anchor_re.search(before) else "")
    ended, closed = text + _END, list(parser.initial_events)
    for start in range(0, len(ended), _FED_CHARS):
        closed += parser.feed(ended[start : start + _FED_CHARS])
    texts: dict[str, list[str]] = {"content": []}
    calls = list[ToolCall]()
    digest = hashlib.blake2b(f"{before}\0{text}".encode(errors="replace"))
    for i, event in enumerate([*closed, *parser.finalize()[1]]):
        if event["type"] != "region_close":
            continue
        field, opening, body = event["field"], event["value"]["open"], event["value"]["body"].removesuffix(_END)
        if field != "tool_calls":
            texts.setdefault(field, []).append(body)
        elif i >= len(closed):
            texts["content"].append(opening + body)
        else:
            for name, arguments, error in _read(spec["fields"][field], opening, body, tools, is_python):
                digest.update(b"\0")
                calls.append(ToolCall(digest.hexdigest()[:_ID_CHARS], name, arguments, error))
    content = _without_end(tokenizer, "".join(texts.pop("content")), stop_ids)
    reasoning = next((texts[name] for name in _REASONING if name in texts), [])
    is_divided = bool(calls or texts)
    return ParsedAnswer(
        content.strip() if is_divided else content, "\n".join(part.strip() for part in reasoning), tuple(calls)
    )


def format_name(tokenizer: Any) -> str:
    """The name in FORMATS of the first format that the chat template shows."""
    templates = tokenizer.chat_template or ""
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    return next((name for name, form in FORMATS.items() if all(mark in text for mark in form.marks)), "hermes")


def _response_template(tokenizer: Any) -> tuple[dict[str, Any], bool]:
    """With whether the bodies of calls are lists of calls in Python."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own, False
    form = FORMATS[format_name(tokenizer)]
    begin = form.reasoning.get("open", form.begins)
    fields = {"reasoning_content": form.reasoning, "tool_calls": form.calls, "content": {}}
    if form.dropped:
        fields["content"] = {"close_pattern": form.dropped}
    return {"start_anchor_pattern": rf"(?={re.escape(begin)}\s*\Z)", "fields": fields}, form.is_python


def _regions(spec: Any, with_calls: bool) -> Any:
    """The template whose regions are texts: it reads nothing of them, so that nothing can be malformed."""
    if not isinstance(spec, dict) or not isinstance(spec.get("fields"), dict):
        return spec  # Transformers states what is wrong
    fields = {}
    for name, region in spec["fields"].items():
        if name == "tool_calls" and not with_calls:
            continue
        ends = {key: region[key] for key in ("close", "close_pattern") if key in region}
        literals = [region["open"]] if isinstance(region.get("open"), str) else region.get("open", ())
        begin = region.get("open_pattern") or "|".join(map(re.escape, sorted(literals, key=len, reverse=True)))
        begins = {"open_pattern": f"(?P<_open>{begin})"} if begin else {}
        value = {"open": "{_open}" if begin else "", "body": "{content}"}
        fields[name] = {**begins, **ends, "repeats": True, "content_args": {"strip": False}, "transform": value}
    return {**spec, "defaults": {}, "fields": fields}


def _read(
    field: dict[str, Any], opening: str, body: str, tools: Sequence[Mapping[str, Any]], is_python: bool
) -> list[tuple[str, str, str]]:
    """(name, arguments, error) of each call in one region, which is one call in most formats."""
    from transformers.utils.chat_parsing import parse_response

    raw = (opening + body).strip()
    try:
        if is_python:
            values = _python_calls(body)
        else:  # the end of the text closes the region: that it was closed is known
            alone = {"start_anchor": _END, "fields": {"tool_calls": field}}
            typed: Any = [dict(tool) for tool in tools] if field.get("content") in _TEXT_VALUES else None
            values = _flat(parse_response(opening + body, alone, prefix="", tools=typed).get("tool_calls", body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as cause:
        reason = cause.__cause__ if isinstance(cause.__cause__, json.JSONDecodeError) else cause
        unnamed = isinstance(cause, KeyError)  # a pattern that found no name
        form = "valid JSON" if field.get("content") == "json" else "in the format of this model"
        return [("", raw, "the tool call names no tool" if unnamed else f"the tool call is not {form}: {reason}")]
    return [_checked(value, raw) for value in values]


def _checked(value: Any, raw: str) -> tuple[str, str, str]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "", raw, 'a tool call must be a JSON object with a "name"'
    name, arguments = function["name"].strip(), function.get("arguments", {})
    if not isinstance(arguments, dict):
        return name, raw, '"arguments" must be a JSON object'
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # an escaped half of a surrogate pair is not a text
    except (ValueError, TypeError, RecursionError) as cause:
        return "", raw, f"the tool call is not valid JSON: {cause}"
    return name, text, ""


def _flat(values: Any) -> list[Any]:
    return [inner for value in values for inner in _flat(value)] if isinstance(values, list) else [values]


class _Constants(ast.NodeTransformer):
    """Templates write lists and objects as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _python_calls(body: str) -> list[Any]:
    """Of `[name(argument=value, ...), ...]`. Arguments that are no literals by name become a text, which is refused."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except SyntaxError:  # LFM2.5's template does not escape the newlines of strings
        tree = ast.parse(body.strip().replace("\n", "\\n"), mode="eval").body
    values = list[Any]()
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call):
            values.append(None)
            continue
        arguments: Any = ast.unparse(node)
        if not node.args and all(each.arg for each in node.keywords):
            named = {each.arg: _Constants().visit(each.value) for each in node.keywords}
            arguments = {name: ast.literal_eval(each) for name, each in named.items()}
        values.append({"name": ast.unparse(node.func), "arguments": arguments})
    return values


def _without_end(tokenizer: Any, content: str, stop_ids: Collection[int]) -> str:
    """The content without the special tokens at its end that only end it."""
    ids = [np.array([i], np.int32) for i in ending_ids(tokenizer, stop_ids) if i is not None]
    ends = tuple(filter(None, (text_of(tokenizer, i, special=True) for i in ids if not text_of(tokenizer, i))))
    content = content.removesuffix(_END)
    while content.endswith(ends) if ends else False:
        content = content.removesuffix(next(end for end in ends if content.endswith(end)))
    return content


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a family writes its answers. marks: texts that all occur in its chat templates. calls, reasoning: fields of a
    response template. dropped: a pattern of tokens that are not part of the content. is_python: a region is a list of
    calls in Python. begins: where reasoning has a pattern, the text with which a prompt begins it.
    """

    models: str
    marks: tuple[str, ...]
    calls: dict[str, Any]
    reasoning: dict[str, Any] = field(default_factory=lambda: {"open": "<think>", "close": "</think>"})
    dropped: str = ""
    is_python: bool = False
    begins: str = "<think>"


_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the field


def _named_call(pattern: str, content: str = "json", **more: Any) -> dict[str, Any]:
    """A call whose opening has its name. content: the form of its arguments."""
    transform = {"function": {"name": "{name}", "arguments": "{content}"}}
    return {"open_pattern": pattern, "content": content, "transform": transform, **more}


FORMATS: dict[str, Format] = {  # the first whose marks a chat template has
    "gpt_oss": Format(
        models="gpt-oss",
        marks=("<|channel|>", "<|call|>"),
        calls=_named_call(
            r"(?:<\|start\|>assistant)?(?:\s*to=functions\.(?P<name>[^\s<]+)\s*<\|channel\|>\w+"
            r"|<\|channel\|>\w+\s+to=functions\.(?P<name>[^\s<]+))[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            close="<|call|>",
        ),
        reasoning={"open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
        dropped=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>|<\|(?:end|return)\|>",
        begins="<|channel|>analysis<|message|>",
    ),
    "gemma4": Format(
        models="Gemma 4",
        marks=("<|tool_call>call:",),
        calls=_named_call(
            r"<\|tool_call>(?:call:(?P<name>[\w.-]+))?",
            close="<tool_call|>",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        reasoning={"open": "<|channel>thought\n", "close": "<channel|>"},
        dropped=r"<turn\|>|<\|tool_response>",
    ),
    "lfm2": Format(
        models="LFM2, LFM2.5",
        marks=("<|tool_", "_start|>"),
        calls={"open": "<|tool_call_start|>", "close": "<|tool_call_end|>"},
        is_python=True,
    ),
    "deepseek": Format(
        models="DeepSeek R1, V3 and V3.1",
        marks=("<｜tool▁call▁begin｜>",),
        calls=_named_call(
            r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
            r"|(?P<name>[^\n<]+)<｜tool▁sep｜>)?",
            close_pattern=r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        ),
        dropped=r"<｜tool▁calls▁(?:begin|end)｜>",
    ),
    "glm": Format(
        models="GLM-4.5 and later",
        marks=("<arg_key>",),
        calls=_named_call(
            r"<tool_call>(?P<name>[^\n<]+)?",
            "xml-inline",
            close="</tool_call>",
            content_args={"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
        ),
    ),
    "xml": Format(
        models="Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3",
        marks=("<function=", "<parameter="),
        calls=_named_call(
            r"<tool_call>\s*(?:<function=(?P<name>[^>\n]+)>)?",
            "xml-inline",
            close="</tool_call>",
            content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        ),
    ),
    "hermes": Format(
        models="Hermes, Qwen 2.5, Qwen 3, and all others, with think tags or without",
        marks=("<tool_call>",),
        calls={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"function": "{content}"},
        },
    ),
    "llama3": Format(
        models="Llama 3.1 to 3.3",
        marks=("<|start_header_id|>", '"parameters": '),
        calls={  # the answer begins with a call, or another call follows after a semicolon
            "open_pattern": r"(?:\A\s*(?:<\|python_tag\|>)?|(?<=\}\s*;))\s*"
            r'(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"parameters")',
            "close_pattern": rf"(?<=\}})\s*(?:;(?=\s*\{{)|(?=<\|eo[tm]_id\|>|{_END}))",
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
        },
        dropped=r"<\|eom_id\|>",
    ),
}
