"""Messages -> token ids, once. Everything that knows a chat template is here.

Ids come from one call of the tokenizer on the rendered template, with no special tokens added around it: the template
writes its own BOS, so there is never a second one (P21). Transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.errors import DataError

Message = dict[str, Any]


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model folder (a hub id works where the hub, or its cache, is reachable).

    Raises: DataError when the path holds no tokenizer that Transformers can load without running foreign code.
    """
    from transformers import AutoTokenizer

    is_folder = Path(path).is_dir()
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=is_folder)
    except (OSError, ValueError) as cause:
        seen = sorted(p.name for p in Path(path).iterdir()) if is_folder else "not a folder on this machine"
        raise DataError(
            f"no tokenizer could be loaded from {str(path)!r} ({seen}): {cause}. "
            "Give a folder that holds tokenizer.json and tokenizer_config.json."
        ) from cause


def render_text(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = True, tools: list[dict] | None = None
) -> str:
    """The template's text for these messages: for people and for comparing, never to be encoded again.

    Raises: DataError without a chat template, or when the template refuses the messages.
    """
    return _apply_template(tokenizer, messages, add_generation_prompt, tools, tokenize=False)


def render(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = True, tools: list[dict] | None = None
) -> np.ndarray:
    """The token ids of these messages, int32[C]. tools: JSON schemas for templates that describe tools to the model.

    Raises: DataError without a chat template, or when the template refuses the messages.
    """
    return np.asarray(_apply_template(tokenizer, messages, add_generation_prompt, tools, tokenize=True), np.int32)


def _apply_template(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, tools: list[dict] | None, tokenize: bool
) -> Any:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so messages can't become tokens. "
            "Put a chat_template.jinja beside its tokenizer.json (base models often ship without one)."
        )
    if not messages:
        raise DataError("no messages to render: a conversation needs at least one message")
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=False,
        )
    except TemplateError as cause:
        roles = [m.get("role") for m in messages]
        raise DataError(f"the chat template refused messages with roles {roles}: {cause}") from cause


def stop_token_ids(
    tokenizer: Any, generation_config: str | Path | None = None, extra: Iterable[int] = ()
) -> tuple[int, ...]:
    """Every id that ends a turn, sorted: the tokenizer's EOS, those of generation_config.json, and `extra`.

    Models differ in where they say it: Qwen2.5's tokenizer names <|im_end|> and its generation config <|endoftext|>
    too. generation_config: the file, or the model folder that may hold it. Empty when nobody names one: such a model
    only ever stops at its length limit.

    Raises: DataError when the file is there but is not JSON, or names something that is no token id.
    """
    found = set(extra)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if generation_config is not None:
        path = Path(generation_config)
        path = path / "generation_config.json" if path.is_dir() else path
        if path.is_file():
            found.update(_eos_of_generation_config(path))
    return tuple(sorted(found))


def _eos_of_generation_config(path: Path) -> list[int]:
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as cause:
        raise DataError(f"{path} is not a JSON object: {cause}") from cause
    ids = [] if named is None else named if isinstance(named, list) else [named]
    bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]
    if bad:
        raise DataError(f"{path}: eos_token_id is {named!r}; it must be a token id or a list of them")
    return ids


def sft_row(
    tokenizer: Any,
    messages: Sequence[Message],
    stop_ids: Iterable[int] | None = None,
    tools: list[dict] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One conversation as (ids int32[T], mask bool[T]); the mask holds exactly what a sampler would have produced.

    Each assistant turn is trained from the first token after its generation prompt up to and including its first stop
    token (P3). What a template writes after that token (ChatML's newline) is not: at generation time the sampler has
    stopped by then and those tokens reach it as context. The row ends with its last trained token.

    stop_ids: what ends a turn in this run; default the tokenizer's EOS. They must hold the template's own end of turn,
    or the trained model would never stop.

    Raises: DataError when no assistant turn is there, when its end is no stop token, when a stop token stands inside
    its content, or when the template renders the same history differently later on.
    """
    stops = frozenset(stop_token_ids(tokenizer) if stop_ids is None else stop_ids)
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[0] == 0:
        raise DataError(
            f"roles {[m.get('role') for m in messages]}: training needs an assistant message that answers something"
        )
    ids = render(tokenizer, messages[: turns[-1] + 1], add_generation_prompt=False, tools=tools)
    mask = np.zeros(len(ids), bool)
    end = 0
    for i in turns:
        head = render(tokenizer, messages[:i], tools=tools)
        full = render(tokenizer, messages[: i + 1], add_generation_prompt=False, tools=tools)
        _require_prefix(tokenizer, head, full, f"message {i} does not begin with its generation prompt")
        end = _turn_end(tokenizer, full, len(head), stops)
        rest = tokenizer.decode(full[end:].tolist(), skip_special_tokens=True)
        if rest.strip():
            raise DataError(
                f"message {i} holds the stop token {tokenizer.convert_ids_to_tokens(int(full[end - 1]))!r} before its "
                f"end; a sampler stops there and {rest[:60]!r} could never be produced. Remove it from the content."
            )
        _require_prefix(
            tokenizer, full[:end], ids, f"it rewrites message {i} once others follow; give one row for each answer"
        )
        mask[len(head) : end] = True
    return ids[:end], mask[:end]


def continuation_ids(
    tokenizer: Any, messages: Sequence[Message], stop_ids: Iterable[int], tools: list[dict] | None = None
) -> np.ndarray:
    """What follows a sampled answer: the template's tokens from just after the answer's stop token, through these
    messages, to the next generation prompt. int32[C]. Nothing that was sampled is encoded again (P20).

    They are cut from a stand-in conversation, so they hold for every history that the template leaves as it stood.

    Raises: DataError when the template ends an assistant turn with none of stop_ids.
    """
    stand_in = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    head = render(tokenizer, stand_in[:1], tools=tools)
    full = render(tokenizer, [*stand_in, *messages], tools=tools)
    _require_prefix(tokenizer, head, full, "an assistant message does not begin with the generation prompt")
    return full[_turn_end(tokenizer, full, len(head), frozenset(stop_ids)) :]


def _turn_end(tokenizer: Any, ids: np.ndarray, start: int, stops: frozenset[int]) -> int:
    """The place just after the first stop token at or after `start`."""
    hits = np.flatnonzero(np.isin(ids[start:], sorted(stops)))
    if len(hits) == 0:
        text, names = tokenizer.decode(ids[start:].tolist())[-40:], tokenizer.convert_ids_to_tokens(sorted(stops))
        raise DataError(
            f"the chat template writes {text!r} to the end of an assistant turn, with none of the stop ids "
            f"{dict(zip(sorted(stops), names))} in it: a model trained on it would never stop. Name the template's end "
            "token as eos_token_id in generation_config.json, or in rollout.sampling.stop_token_ids."
        )
    return start + int(hits[0]) + 1


def _require_prefix(tokenizer: Any, head: np.ndarray, full: np.ndarray, why: str) -> None:
    if len(head) <= len(full) and np.array_equal(head, full[: len(head)]):
        return
    shared = min(len(head), len(full))
    differ = np.flatnonzero(head[:shared] != full[:shared])
    at = int(differ[0]) if len(differ) else shared
    shorter, longer = (tokenizer.decode(ids[at : at + 8].tolist()) for ids in (head, full))
    raise DataError(
        f"this chat template can't be split into turns: {why}. At token {at} the shorter rendering reads {shorter!r} "
        f"and the longer {longer!r}."
    )
