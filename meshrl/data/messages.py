"""Messages and tools of a row: one form for all layouts with the same meaning, and an error for those that a chat
template would render as something else. The text of such an error follows the row's place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, parse_json
from meshrl.data.chat import Message, image_literal, render_text
from meshrl.data.media import content_text, parts_of

MARK = "<image>"  # of an image in the text of a row
# Templates may have further roles, so only a role that looks like a misspelled one of these is refused, or one of
# another layout.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_ROLES = dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
_OTHER_ROLES |= dict.fromkeys(("human", "prompter"), "user")
# How chat templates begin a turn, perhaps after a token that begins a text; and templates that are plain text.
_RENDERED = re.compile(
    r"(<s>|<bos>|<BOS_TOKEN>|\[gMASK\]|<sop>|<\|(begin_of_text|endoftext)\|>|<｜begin▁of▁sentence｜>)*\s*"
    r"(<\|(im_|start_header|header_start|start_of_role|START_OF_TURN|start\||turn>|user\||system\||assistant\|)"
    r"|<｜(User|Assistant|System)｜>|<start_of_turn>|\[(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]|\[\|user\|\])"
)
_SEARCHED = 500  # characters at the beginning of a text: a long one must not take long
_PLAIN_RENDERED = re.compile(r"(Human|User|USER):.*?\n[ \t]*(Assistant|ASSISTANT|AI):", re.DOTALL)
_PLAIN_QUESTION = re.compile(r"(Human|User|USER|### Instruction):")
_PLAIN_END = re.compile(r"(Assistant|ASSISTANT|### Response):\s*(<think>\s*)?$")  # within the last 60 characters
_ROLE = r"""['"](role|from)['"]\s*:\s*['"](system|user|human|assistant|gpt)['"]"""
_MESSAGES_AS_TEXT = re.compile(  # as JSON, or as Python writes them
    rf"""\[?\s*\{{\s*({_ROLE}|['"](messages|conversations|content|value)['"]\s*:.*{_ROLE})""", re.DOTALL
)


def messages_of(value: Any, name: str, template: Any, is_filled: bool, takes_text: bool = True) -> list[Message]:
    """A list of messages, or with takes_text a text as the user's message. Keys without a value are left out, and
    arguments of tool calls that are JSON text are parsed, as chat templates expect them. name: of the value, for
    errors. is_filled: as in RawRow."""
    wanted = "a list of {role, content} messages" + (" or a string" if takes_text else "")
    if isinstance(value, str) and (_MESSAGES_AS_TEXT.match(value.lstrip()[:_SEARCHED]) or _is_json_of_messages(value)):
        raise DataError(f"{name} is JSON text, {shown(value)}; it should be the list: parse it in a data.map function")
    if isinstance(value, str) and takes_text:
        if not value.strip():
            raise DataError(f"{name} is an empty string; it should be {wanted}")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{name} is {shown(value)}; it should be {wanted}")
    given = without_nulls(value) if is_filled else value
    return [_message(message, f"message {i} of {name}", template) for i, message in enumerate(given)]


def _is_json_of_messages(text: str) -> bool:
    """Whether it is JSON text of a message, a list of them, or an object with such a list, perhaps encoded twice."""
    text = text.lstrip("\ufeff \t\r\n")
    if text[:1] not in ("[", "{", '"') or text.rstrip()[-1] not in ']}"':
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if isinstance(found, str):
        return _is_json_of_messages(found)
    listed = found if isinstance(found, list) else [found, *found.values()]
    first = [each[0] if isinstance(each, list) and each else each for each in listed[:8]]
    return any(isinstance(m, dict) and m.keys() & {"role", "from"} and m.keys() & {"content", "value"} for m in first)


def _message(given: Any, name: str, template: Any) -> Message:
    message = {k: v for k, v in given.items() if v is not None and v != []} if isinstance(given, dict) else {}
    if (calls := message.get("tool_calls")) is not None:
        calls = parsed(calls) if isinstance(calls, str) else calls
        calls = [_call(call, name) for call in (calls if isinstance(calls, list) else [calls])]
        message = {"content": "", **message, "tool_calls": calls}  # OpenAI's messages that call tools have no content
    role = message.get("role")
    if isinstance(message.get("content"), list):
        message["content"] = _parts(message["content"], name)
    if "function_call" in message:
        raise DataError(f"{name} has function_call, OpenAI's older form; write it as tool_calls")
    if not isinstance(role, str) or not isinstance(message.get("content"), str | list):
        more = ". ShareGPT's keys from and value must be renamed" if "from" in message else ""
        example = '{"role": "user", "content": "text"}'
        raise DataError(f"{name} is {shown(given)}; it should be like {example}{more}")
    meant = [] if role in _ROLES else difflib.get_close_matches(role.lower(), _ROLES, 1, cutoff=0.8)
    if role.lower() in _OTHER_ROLES and not re.search(rf"['\"]{role}['\"]", str(template)):
        meant = [_OTHER_ROLES[role.lower()]]
    if meant:
        raise DataError(f"{name} has the role {role!r}; did you mean {meant[0]!r}?")
    return message


def _parts(given: list[Any], name: str) -> str | list[dict[str, Any]]:
    """The parts of a content, of which those of images have the image as `image` if they name one; a text if there are
    no images."""
    parts = list[dict[str, Any]]()
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            values = [part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None]
            parts.append({"type": "image", **({"image": values[0]} if values else {})})
        else:
            wanted = '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
            raise DataError(f"{name} has the part {shown(part)}; it should be {wanted}")
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def placed_images(messages: Sequence[Message], column: Sequence[Any], tokenizer: Any) -> list[Any]:
    """The images of these messages in order, whose parts get media ids: image-0 and so on.

    column: the row's images. They are those of the parts that name none, or of the marks `<image>` in the texts;
    without such places they precede the text of the user's first message.
    """
    texts = [message for message in messages if isinstance(message["content"], str)]
    if column and not any(part == {"type": "image"} for part in parts_of(messages)):
        user = next((message for message in texts if message["role"] == "user"), None)
        if user is not None and not any(MARK in message["content"] for message in texts):
            user["content"] = MARK * len(column) + user["content"]
        for message in texts:
            pieces = [({"type": "image"}, {"type": "text", "text": text}) for text in message["content"].split(MARK)]
            if len(pieces) > 1:
                parts = [part for pair in pieces for part in pair][1:]
                message["content"] = [part for part in parts if part.get("text") != ""]
    placed = [part for part in parts_of(messages) if part["type"] == "image"]
    free = [part for part in placed if "image" not in part]
    if len(free) != len(column):
        raise DataError(
            f"it has {len(column)} images for {len(free)} places ({MARK} in a text, or parts of type image)"
        )
    for part, image in zip(free, column):
        part["image"] = image
    if literal := image_literal(tokenizer, content_text(messages)):
        raise DataError(f"a text has {literal!r}, which stands for an image of the model; remove it, or give an image")
    images = [part["image"] for part in placed]
    for i, part in enumerate(placed):
        part["image"] = f"image-{i}"
    return images


def _call(call: Any, name: str) -> dict[str, Any]:
    """A tool call whose arguments are an object."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    made = parsed(arguments or "{}") if isinstance(arguments, str) else arguments
    if not isinstance(made, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{name} has the tool call {shown(call)}; it needs a name, and arguments as a JSON object")
    complete = {**function, "arguments": made}
    return {**call, "function": complete} if "function" in call else complete


def tools_of(value: Any, name: str, is_filled: bool) -> list[dict[str, Any]] | None:
    """The tools of a row, given as a list or as its JSON text; None if it has none."""
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    tools = parsed(value) if isinstance(value, str) else value
    listed = tools if isinstance(tools, list) else [tools]
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in listed]
    if not all(isinstance(function, dict) and "name" in function for function in functions):
        raise DataError(
            f"{name} is {shown(value)}; it should be a list of {{type, function: {{name, parameters}}}}, or its JSON "
            "text. Set the key that names this column to null if it has no tools"
        )
    return (without_nulls(tools) if is_filled else tools) or None


def require_rendered(tokenizer: Any, messages: Sequence[Message], tools: Any, name: str, *keys: str) -> None:
    """Raises: DataError when the template leaves out tools or these keys of messages, and when a text is rendered
    already, unless the template writes nothing else."""
    template = str(tokenizer.chat_template)
    has = [key for key in keys if any(key in message for message in messages)] + ["tools"] * bool(tools)
    if lost := [key for key in has if key not in template]:
        raise DataError(
            f"the chat template leaves out {' and '.join(lost)} of {name}. Name one that writes them in "
            "data.chat_template (sft.chat_template), or remove them"
        )
    for i, message in enumerate(messages):
        text, is_rendered = content_text([message]), message["role"] in ("user", "system")
        if not _RENDERED.match(text.lstrip()[:_SEARCHED]):
            ends = _PLAIN_END.search(text[-60:]) and _PLAIN_QUESTION.search(text)
            is_plain = _PLAIN_RENDERED.match(text.lstrip()) or ends
            is_rendered = len(messages) == 1 and bool(is_plain)
        if is_rendered and render_text(tokenizer, messages) != text:
            raise DataError(
                f"message {i} of {name} is a rendered prompt, {shown(text)}: the template would be applied again. Give "
                "the messages, or set data.chat_template to '{{ messages[0].content }}', which adds nothing to a text"
            )


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its objects."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def parsed(text: str) -> Any:
    """The value of a JSON text; None for other texts."""
    try:
        return parse_json(text)
    except Unreadable:
        return None


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
