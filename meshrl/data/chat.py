"""Renders messages to token ids, once. All code that uses a chat template is here.

Ids come from one call of the tokenizer on the rendered template, with no special tokens added around it: the template
writes its own BOS, so there is never a second one. Transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import codecs
import inspect
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, is_there, read_json, read_text, size_of
from meshrl.core.lookup import did_you_mean
from meshrl.core.types import Media
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.decode import text_of
from meshrl.data.files import as_data_error, require_reachable
from meshrl.data.media import parts_of

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None  # JSON schemas
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# In init_kwargs, as Transformers stores a tokenizer's arguments.
_VARIABLES, _DATE, _PARTS = "chat_template_kwargs", "date", "content_as_parts"
IMAGE_TOKEN, IMAGE_LITERALS = "image_token_of_templates", "image_literals"
_CONTENT = "stand-in answer"  # of a placeholder message that shows how a template ends one; no template contains it


def load_tokenizer(
    path: str | Path,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    date: datetime | None = None,
) -> Any:
    """The tokenizer of a model folder (a hub id works where the hub, or its cache, is reachable).

    chat_template: replaces the tokenizer's own; the text, the path of a file, or a name in BUILT_IN.
    chat_template_kwargs: variables that the template gets in every rendering.
    date: the template writes it as today's; None = the date of each rendering.
    All are stored in the tokenizer, so that prompts, the continuations of turns and SFT rows are rendered the same way.

    Raises: DataError when the path has no tokenizer that Transformers can load without running its code, and for
    a template or variables that can't be used.
    """
    tokenizer = read_tokenizer(path)
    missing = set(CHATML_TOKENS) - set(tokenizer.get_vocab()) if chat_template in BUILT_IN else ()
    if missing:
        raise DataError(
            f"the tokenizer {str(path)!r} has no token {' and no token '.join(sorted(missing))}, which chat_template: "
            f"{chat_template} writes; an answer would never end. Give a template with this tokenizer's own tokens"
        )
    with as_data_error(f"the chat template for {str(path)!r} ({(chat_template or 'its own'):.80}) "):
        if chat_template is not None:
            tokenizer.chat_template = template_text(chat_template)
        templates = tokenizer.chat_template or {}
        named = templates if isinstance(templates, dict) else {"default": templates}
        checked = named.values() if chat_template is not None or chat_template_kwargs else ()
        reads = {name for text in checked for name in variables_read_by(text)}
    require_read(chat_template_kwargs or (), reads)
    tokenizer.init_kwargs |= {_VARIABLES: dict(chat_template_kwargs or {}), _DATE: date and date.isoformat()}
    _require_content(tokenizer)
    return tokenizer


def _require_content(tokenizer: Any) -> None:
    """Raises: DataError when the template leaves out the text of a question. Some templates of vision-language models
    do so for a text and not for a list of parts: they get lists from now on."""
    for parts in (False, True):
        tokenizer.init_kwargs[_PARTS] = parts
        try:
            text = render_text(tokenizer, [{"role": "user", "content": _CONTENT}])
        except DataError:  # no template, or one that accepts only longer conversations
            tokenizer.init_kwargs[_PARTS] = False
            return
        if _CONTENT in text:
            return
    raise DataError(
        f"the chat template of {tokenizer.name_or_path!r} leaves out the text of user messages: it renders "
        f"{_CONTENT!r} as {text[-80:]!r}. Set data.chat_template to a template that writes content that is a text"
    )


def read_tokenizer(path: str | Path) -> Any:
    """As load_tokenizer, for uses that render nothing: its template is not checked."""
    from transformers import AutoTokenizer

    folder = Path(path)
    is_folder = folder.is_dir()
    if is_folder:
        _require_plain_files(folder)
    require_reachable(str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=is_folder, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # a class's defaults, where the files are missing
            raise ValueError("it has no tokens but special ones")
        return tokenizer
    except BaseException as cause:  # damaged files may raise anything; a panic in Rust is not an Exception
        if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
            raise
        seen = sorted(p.name for p in folder.iterdir()) if is_folder else "not a folder on this machine"
        fault = str(cause)
        if is_folder:  # a tokenizer.json that is not JSON; parsing the large file takes long, so only after an error
            try:
                read_json(folder / "tokenizer.json")
            except Unreadable as damage:
                fault = f"tokenizer.json: {damage}"
        raise DataError(
            f"no tokenizer could be loaded from {str(path)!r} ({seen}): {fault:.1000}. "
            "Give a folder with complete tokenizer.json and tokenizer_config.json, which need no code of their own."
        ) from cause


def _require_plain_files(folder: Path) -> None:
    """Raises: DataError with the name of a file that is not regular, not JSON, or needs code of its own."""
    for name in (*_JSON_FILES, *_OTHER_FILES):
        file = folder / name
        if not is_there(file) and not file.is_symlink():
            continue
        with as_data_error(f"{file}: ", ". Copy the tokenizer's files again, or write them by save_pretrained."):
            size_of(file)
            content = read_json(file) if name in _JSON_FILES else {}
            if name == "chat_template.jinja" and read_text(file) and file.read_bytes().startswith(codecs.BOM_UTF8):
                raise Unreadable("it begins with a byte order mark, which would precede every prompt; remove it")
        if "auto_map" in content and name == "tokenizer_config.json" and not is_there(folder / "tokenizer.json"):
            raise DataError(
                f"{file}: auto_map names code of its own ({content['auto_map']!r:.120}), which meshrl never runs. "
                "Give a tokenizer that was saved as tokenizer.json."
            )


_JSON_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_FILES = ("tokenizer.json", "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model")


def is_template_text(template: str) -> bool:
    """Whether this is the text or the name of a template and not a path: a text without Jinja would make every prompt
    the same."""
    return template in BUILT_IN or "{{" in template or "{%" in template


def template_text(template: str | Path) -> str:
    """The template's text, as given, of the built-in one, or from the file at the path, which its errors follow."""
    if isinstance(template, str) and is_template_text(template):
        return BUILT_IN.get(template, template)
    with as_data_error(""):
        text = read_text(Path(template))
    if not is_template_text(text):
        raise DataError(f"has neither {{{{ nor {{% in it, so every prompt would be the text {text[:60]!r}")
    return text


def variables_read_by(text: str) -> set[str]:
    """The variables that a template reads and does not set itself. Errors follow the name of the template."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables

    class Generation(Extension):
        """Transformers' {% generation %}, which marks assistant text; its content is ordinary Jinja."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        return find_undeclared_variables(Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(text))
    except TemplateSyntaxError as cause:
        lines = text.splitlines()
        line = lines[cause.lineno - 1].strip() if 0 < cause.lineno <= len(lines) else ""
        reason = (cause.message or "").rstrip(".")  # the caller ends the sentence
        raise DataError(f"is not valid Jinja in line {cause.lineno} ({line:.120}): {reason}") from cause
    except RecursionError as cause:
        raise DataError("is not valid Jinja: its blocks are nested too deeply") from cause


def require_read(variables: Iterable[str], reads: set[str]) -> None:
    """Raises: DataError for a variable of chat_template_kwargs that would have no effect."""
    for name in variables:
        if name not in reads:
            raise DataError(
                f"chat_template_kwargs.{name} would have no effect: the chat template does not read it. It reads "
                f"{', '.join(sorted(reads)) or 'no variable'}{did_you_mean(name, reads) or '.'} Remove it, or correct "
                "its name"
            )


def render_text(tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> str:
    """The text of these messages and of a generation prompt, as the template renders it: for reading and comparing,
    never to be encoded again."""
    return _apply_template(tokenizer, messages, True, tools, tokenize=False)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool | None = True,
    tools: Tools = None,
    media: Mapping[str, Media] | None = None,
) -> np.ndarray:
    """The token ids of these messages, int32[C]. add_generation_prompt: None = they end with the content of the last
    message, which the model continues. tools: for templates that describe tools to the model. media: has the
    messages' images, each of which the template writes as one token, and the ids have with all its placeholders."""
    rendered = _apply_template(tokenizer, messages, add_generation_prompt, tools, tokenize=not media)
    if not media:
        return np.asarray(rendered, np.int32)
    token = tokenizer.init_kwargs.get(IMAGE_TOKEN, "the token of an image")
    names, between = [part["image"] for part in parts_of(messages) if part["type"] == "image"], rendered.split(token)
    if IMAGE_TOKEN not in tokenizer.init_kwargs or len(between) != len(names) + 1:
        raise DataError(
            f"the chat template writes {token!r} {len(between) - 1} times for {len(names)} images; set "
            "data.chat_template to one of a model with images, which writes it once for each part {type: image}"
        )
    after = (media[name].text + rest for name, rest in zip(names, between[1:]))
    ids = tokenizer("".join([between[0], *after]), add_special_tokens=False)["input_ids"]
    return np.asarray(ids, np.int32)


def image_literal(tokenizer: Any, text: str) -> str | None:
    """A token in this text that stands for an image or a video of the model, so that it must not be in a text."""
    return next((each for each in tokenizer.init_kwargs.get(IMAGE_LITERALS, ()) if each in text), None)


def _apply_template(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool | None, tools: Tools, tokenize: bool
) -> Any:
    from jinja2 import TemplateError

    variables, date = dict(tokenizer.init_kwargs.get(_VARIABLES, {})), tokenizer.init_kwargs.get(_DATE)
    if date is not None:  # Transformers' function reads the clock
        variables["strftime_now"] = datetime.fromisoformat(date).strftime
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so messages can't become tokens. "
            "Put a chat_template.jinja into its folder (base models often have none), or name one in "
            "data.chat_template (sft.chat_template), where chatml and chatml_tools are built in."
        )
    if not messages:
        raise DataError("no messages to render: a conversation needs at least one message")
    if tokenizer.init_kwargs.get(_PARTS):
        messages = [{**message, "content": parts_of([message])} for message in messages]
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            add_generation_prompt=bool(add_generation_prompt),
            continue_final_message=add_generation_prompt is None,
            tokenize=tokenize,
            return_dict=False,
            **variables,
        )
    except Exception as cause:  # a template is a program: it may raise anything
        roles = [m.get("role") for m in messages]
        reason = cause if isinstance(cause, TemplateError) else f"{type(cause).__name__}: {cause}"
        line = _template_line(cause)
        raise DataError(f"the chat template refused messages with roles {roles}{line}: {reason}") from cause


def _template_line(error: BaseException) -> str:
    """The template's line in which the error was raised; Jinja's frames have the line numbers of the template."""
    line, frame = getattr(error, "lineno", None), error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<template>" else line
        frame = frame.tb_next
    return "" if line is None else f", in line {line} of it"


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as chat templates describe it to a model: name, description, and parameters as a JSON schema with
    `required`, from its types and its docstring in Google style, which describes each parameter under `Args:`.

    Raises: DataError, with a text that follows the function's name, when a part is missing.
    """
    from transformers.utils import get_json_schema

    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
        if bad := [parameter.name for parameter in parameters if parameter.kind not in by_name]:
            raise DataError(f"its parameters {bad} can't be given by name, as a model gives them")
        described = get_json_schema(function)["function"]
    except DataError:
        raise
    except Exception as cause:  # Transformers evaluates the user's annotations
        raise DataError(f"it can't be described to the model: {cause}") from cause
    return {name: described[name] for name in ("name", "description", "parameters")}


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """How a trained model is asked and where its answers end. template: replaces the tokenizer's; None = keep that.
    stop_token_ids: every id that ended an answer in the run; None = not known."""

    template: str | None = None
    stop_token_ids: tuple[int, ...] | None = None


def write_chat(folder: Path, chat: ChatFiles) -> None:
    """Write a model's chat template and stop ids into its folder, so that `generate` ends where the run's evaluations
    did: generation_config.json has exactly these ids, and config.json, which some servers read, no others."""
    if chat.template is not None:  # Transformers prefers this file to a template in tokenizer_config.json
        (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8", newline="")
    if chat.stop_token_ids is None:
        return
    first, *more = chat.stop_token_ids or (None,)
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and not {*_listed(part.get("eos_token_id"))} <= {*chat.stop_token_ids}:
            part["eos_token_id"] = first
    generation["eos_token_id"] = [first, *more] if more else first
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _listed(ids: Any) -> list[Any]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def stop_token_ids(tokenizer: Any, model: str | Path | None = None, further: Iterable[int] = ()) -> tuple[int, ...]:
    """Every id that ends a turn, sorted: the tokenizer's EOS, those of generation_config.json of `model`, a folder or a
    hub id, the token with which the chat template ends an assistant's turn, and the further ones.

    Models differ in the place of these ids: Qwen2.5's tokenizer has <|im_end|>, and its generation config also
    <|endoftext|>; the EOS of a base model is often not the token with which its chat template ends a turn.
    If no place has an id, the result is empty: the model stops only at its length limit.
    """
    from transformers.utils import cached_file

    ids = {*further, *_listed(tokenizer.eos_token_id)}
    config = None
    if model is not None:
        optional = {f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors")}
        config = cached_file(str(model), "generation_config.json", **optional)
    if config is not None:
        with as_data_error(f"{config}: "):
            named = read_json(Path(config)).get("eos_token_id")
        listed = _listed(named)
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in listed):
            raise DataError(f"{config}: eos_token_id is {named!r}; it must be a token id or a list of them")
        ids.update(listed)
    return tuple(sorted(ids | _end_of_turn(tokenizer)))


def _end_of_turn(tokenizer: Any) -> set[int]:
    """The special token that the chat template writes after an assistant's message; empty if it writes none, or if it
    refuses the placeholder conversation."""
    if not tokenizer.chat_template:
        return set()
    try:
        ids = render(tokenizer, _placeholder(), add_generation_prompt=False)
        rest = ids[_content_end(tokenizer, ids) :].tolist()
    except DataError:  # the template may still accept the messages of the data
        return set()
    added = tokenizer.added_tokens_decoder
    ends = (token for token in rest if token in added or tokenizer.decode([token]).strip())
    end = next(ends, None)
    return {end} if end is not None and end in added else set()


def _placeholder() -> list[Message]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": _CONTENT}]


def _content_end(tokenizer: Any, ids: np.ndarray) -> int:
    """The index just after the text of the placeholder answer."""
    counts = range(len(ids) + 1)
    end = bisect_left(counts, True, key=lambda count: _CONTENT in text_of(tokenizer, ids[:count], special=True))
    if end > len(ids):
        raise DataError(
            f"the chat template does not write the content of assistant messages: it renders {_CONTENT!r} as "
            f"{tokenizer.decode(ids.tolist())[-80:]!r}. Set data.chat_template to a template that does."
        )
    return end


def sft_row(
    tokenizer: Any,
    messages: Sequence[Message],
    stop_ids: Iterable[int] | None = None,
    tools: Tools = None,
    media: Mapping[str, Media] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One conversation as (ids int32[T], mask bool[T]); the mask is True for the tokens that a sampler would produce.

    Each assistant turn is trained from the first token after its generation prompt up to and including its first stop
    token. Tokens that a template writes after it (ChatML's newline) are not trained: a sampler has stopped before
    them and gets them as context. The row ends with its last trained token.

    stop_ids: the ids that end a turn in this run; default the tokenizer's EOS. The token with which the template ends a
    turn must be one of them, or the trained model would never stop. media: as for `render`.
    """
    stops = frozenset(stop_token_ids(tokenizer) if stop_ids is None else stop_ids)
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        raise DataError(
            f"roles {[m.get('role') for m in messages]}: training needs an assistant message after another message"
        )
    ids = render(tokenizer, messages[: turns[-1] + 1], False, tools, media)
    mask, end = np.zeros(len(ids), bool), 0
    for i in turns:
        head = render(tokenizer, messages[:i], True, tools, media)
        full = render(tokenizer, messages[: i + 1], False, tools, media)
        _require_prefix(tokenizer, head, full, f"message {i} does not begin with its generation prompt")
        end = _turn_end(tokenizer, full, len(head), stops)
        rest = tokenizer.decode(full[end:].tolist(), skip_special_tokens=True)
        if rest.strip():
            raise DataError(
                f"message {i} has the stop token {tokenizer.convert_ids_to_tokens(int(full[end - 1]))!r} before its "
                f"end; a sampler stops there and could never produce {rest[:60]!r}. Remove it from the content."
            )
        _require_prefix(
            tokenizer, full[:end], ids, f"it rewrites message {i} when others follow; give one row for each answer"
        )
        mask[len(head) : end] = True
    return ids[:end], mask[:end]


def continuation_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    stop_ids: Iterable[int],
    tools: Tools = None,
    ended_by: int | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
) -> np.ndarray:
    """The context tokens that follow a sampled answer: the template's tokens from just after the answer's stop token,
    through these messages, to the next generation prompt. int32[C]. Sampled text is not encoded again.

    They are taken from a placeholder conversation, so they fit every history that the template does not rewrite.

    ended_by: the one of stop_ids with which the answer ends. None = a stop string ended it: then the template's own end
    of the turn comes first, as context that is not trained. Some templates, such as GLM's, write no end: their stop ids
    begin the next message. Then this token is context, too, unless it is the one that was sampled.
    calls: those of the answer as messages have them, for a template of which `needs_calls` is true.
    """
    question, answer = _placeholder()
    if calls:
        stand_ins = [{**c, "function": {**c["function"], "arguments": {"stand_in": _CONTENT}}} for c in calls]
        answer = {"role": "assistant", "content": "", "tool_calls": stand_ins}
    full = render(tokenizer, [question, answer, *messages], tools=tools)
    start = _content_end(tokenizer, full)
    if ended_by is None and not calls:
        return full[start:]
    end = _turn_end(tokenizer, full, start, frozenset(stop_ids))
    is_sampled = ended_by == full[end - 1] or (ended_by is not None and int(full[end - 1]) in _end_of_turn(tokenizer))
    return full[end if is_sampled else end - 1 :]


@lru_cache(maxsize=8)  # a further turn asks each time, and the template of a loaded tokenizer stays
def needs_calls(tokenizer: Any) -> bool:
    """Whether the template renders the answer of a tool only after a message with `tool_calls`, as that of gpt-oss."""
    question, answer = _placeholder()
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    result = {"role": "tool", "content": _CONTENT, "tool_call_id": "call00001", "name": "f"}

    def is_shown(answer: Message) -> bool:
        try:
            return _CONTENT in render_text(tokenizer, [question, answer, result])
        except DataError:
            return False

    return not is_shown({**answer, "content": "x"}) and is_shown({**answer, "content": "", "tool_calls": [call]})


def _turn_end(tokenizer: Any, ids: np.ndarray, start: int, stops: frozenset[int]) -> int:
    """The index just after the first stop token at or after `start`."""
    hits = np.flatnonzero(np.isin(ids[start:], sorted(stops)))
    if len(hits) == 0:
        text, names = tokenizer.decode(ids[start:].tolist())[-40:], tokenizer.convert_ids_to_tokens(sorted(stops))
        raise DataError(
            f"the chat template writes {text!r} at the end of an assistant turn, which contains none of the stop ids "
            f"{dict(zip(sorted(stops), names))}: a model trained on it would never stop. Add the template's end "
            "token to eos_token_id in generation_config.json, or to rollout.sampling.stop_token_ids."
        )
    return start + int(hits[0]) + 1


def _require_prefix(tokenizer: Any, head: np.ndarray, full: np.ndarray, reason: str) -> None:
    if len(head) <= len(full) and np.array_equal(head, full[: len(head)]):
        return
    shared = min(len(head), len(full))
    differ = np.flatnonzero(head[:shared] != full[:shared])
    at = int(differ[0]) if len(differ) else shared
    shorter, longer = (tokenizer.decode(ids[at : at + 8].tolist()) for ids in (head, full))
    raise DataError(
        f"this chat template can't be split into turns: {reason}. From token {at} on, the earlier messages "
        f"alone are rendered as {shorter!r}, with more messages as {longer!r}. Set sft.chat_template to another one."
    )
