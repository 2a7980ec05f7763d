"""Rows of a table -> Prompts (for RL) and SftRows (for SFT). A bad row is an error with file and line, or left out."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshrl.config.data import DataConfig
from meshrl.config.loop import SftConfig
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.lookup import look_up
from meshrl.core.types import Media, Prompt, Sample, unsampled_row
from meshrl.data.chat import Message, render, sft_row
from meshrl.data.files import as_data_error
from meshrl.data.images import image_of
from meshrl.data.media import content_text, find_spans
from meshrl.data.messages import messages_of, placed_images, require_rendered, shown, tools_of
from meshrl.data.processor import Vision
from meshrl.data.tables import RawRow, Row, RowTable, Table, column_of, open_table

T = TypeVar("T")
MAPPED = ("prompt", "messages", "answer", "env", "meta", "tools", "images")  # what a data.map function may return
MAX_SHOWN, MAX_READ_S = 10, 10.0  # bad rows in one error; seconds after which a table with bad rows is not read further
DECODED_S = 10.0  # images are decoded at the start for so long; of later rows only the headers are read
IMAGES = "images"  # the column of images, if data.images is null


class MissingAnswerError(DataError):
    """A row without an answer, which no reward term is known to need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRow:
    """One rendered conversation: ids int32[T], mask bool[T] (trained tokens), both read-only; and its images."""

    id: str
    ids: np.ndarray
    mask: np.ndarray
    media: dict[str, Media] = field(default_factory=dict)
    media_spans: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def content(self) -> bytes:
        """To compare it with others."""
        return b"".join([self.ids.tobytes(), *(media.digest.encode() for media in self.media.values())])

    def sample(self, name: str) -> Sample:
        row = unsampled_row(name, self.ids, self.mask)
        row.media, row.media_spans = self.media, self.media_spans
        return row


@dataclass(frozen=True)
class PromptMaker:
    """RawRow -> rendered Prompt, as data.{prompt, answer, system, map} define it.

    tools: schemas of the agent's tools, for templates that put them into the prompt. vocab_size: of the model that
    reads the ids, if it is known. answer_for: names of the reward terms that need an answer in every row. source: the
    row's source in a mixture; it is the beginning of the prompt's id and the prompt's `env`, so that a reward function
    can see the source of a question. bad: gets the errors of bad rows, which are left out; None = they are raised.
    held_out: with data.eval_fraction, whether load_prompts gives the rows that are held out, or the others.
    vision: of the model; None if it reads text only.
    """

    cfg: DataConfig
    tokenizer: Any
    tools: list[dict] | None = None
    vocab_size: int | None = None
    answer_for: Sequence[str] = ()
    source: str | None = None
    bad: list[str] | None = None
    held_out: bool = False
    vision: Vision | None = None

    @functools.cached_property
    def _map(self) -> Callable[[Row], Any] | None:
        path = self.cfg.map
        function = None if path is None else look_up(path, {}, "data.map")
        if path is not None and not callable(function):
            raise ConfigError(f"data.map is {path!r}, which is a {type(function).__name__}; it must be a function")
        return function

    def __call__(self, raw: RawRow, ordinal: int, draft: bool = False) -> Prompt:
        """draft: of images only the header is read, and a prompt that has some gets no ids.

        Raises: DataError for a row that does not fit the config, that the chat template refuses, or that is rendered to
        ids which the model does not have."""
        raw.require_read()
        row = self._columns(raw) if self._map is None else self._mapped(raw, self._map)
        answer = row["answer"]
        column = "data.answer" if self.cfg.answer is None else f"column {self.cfg.answer!r}"
        name = column if self._map is None else f"the answer from data.map {self.cfg.map}"
        is_blank = isinstance(answer, str) and not answer.strip()
        blank = f"{raw.where}: {name} is {'an empty string' if is_blank else 'null'}"
        if self.answer_for and (answer is None or is_blank):
            terms = ", ".join(f"reward.terms.{term}" for term in self.answer_for)
            raise DataError(
                f"{blank}, but completions are compared with it ({terms}); give the row an answer, or remove the row"
            )
        is_missing = answer is None or (is_blank and self.bad is not None)
        if is_missing and self._map is None and self.cfg.answer is not None:
            raise MissingAnswerError(f"{blank}; give the row an answer, or remove the row")
        with as_data_error(f"{raw.where}: "):
            messages = messages_of(row["content"], row["name"], self.tokenizer.chat_template, raw.is_filled)
            limit = ("data.max_prompt_tokens", self.cfg.max_prompt_tokens)
            media = media_of(self.vision, messages, row["images"], raw.folder, self.tokenizer, limit, draft)
            continues = self.cfg.continue_last and messages[-1]["role"] == "assistant"
            _require_open(messages, row["name"], continues)
            own_tools = tools_of(row["tools"], f"column {self.cfg.tools!r}", raw.is_filled)
            if own_tools and self.tools:
                raise DataError("it has tools, but only the agent's can be called; set data.tools: null")
            messages = _after_system(messages, self.cfg.system, row["name"], "data.system")
        prompt = Prompt(
            id=raw.id if self.source is None else f"{self.source}/{raw.id}",
            ordinal=ordinal,
            messages=messages,
            media=media,
            answer=_plain(row["answer"], "the answer", raw.where),
            env=row["env"] or self.source or "default",
            meta={name: _plain(value, f"column {name!r}", raw.where) for name, value in row["meta"].items()},
        )
        with as_data_error(f"{raw.where}: "):
            ids = render(self.tokenizer, messages, None if continues else True, own_tools or self.tools, media)
            require_rendered(self.tokenizer, messages, own_tools, row["name"], "tool_calls")
        _require_known(ids, self.tokenizer, self.vocab_size, raw.where)
        if draft and media:
            return prompt
        if media and self.vision is not None:
            with as_data_error(f"{raw.where}: "):
                prompt.media_spans = find_spans(ids, media, self.vision.placeholder)
        prompt.ids = ids
        ids.flags.writeable = False
        return prompt

    def _columns(self, raw: RawRow) -> dict[str, Any]:
        """Columns other than prompt and answer become `meta`."""
        cfg, answer = self.cfg, None
        content = column_of(raw.data, cfg.prompt, "data.prompt", raw.where)
        if cfg.answer is not None:
            answer = column_of(raw.data, cfg.answer, "data.answer", raw.where)
        images = cfg.images or IMAGES
        meta = {k: v for k, v in raw.data.items() if k not in (cfg.prompt, cfg.answer, images)}
        named = {
            "name": f"column {cfg.prompt!r}",
            "tools": raw.data.get(cfg.tools or ""),
            "images": raw.data.get(images),
        }
        return {"content": content, **named, "answer": answer, "env": None, "meta": meta}

    def _mapped(self, raw: RawRow, function: Callable[[Row], Any]) -> dict[str, Any]:
        prefix = f"{raw.where}: data.map {self.cfg.map}"
        wanted = f"it should be a dict with either prompt or messages, and optionally {', '.join(MAPPED[2:])}"
        try:
            made = function(raw.data)
        except Exception as error:  # user code: it may raise anything
            raise DataError(f"{prefix} raised {type(error).__name__}: {error}") from error
        if not isinstance(made, dict):
            raise DataError(f"{prefix} returned {shown(made)}; {wanted}")
        strange = [name for name in made if name not in MAPPED]
        if strange or ("prompt" in made) == ("messages" in made):
            raise DataError(f"{prefix} returned a dict with {', '.join(map(repr, made)) or 'nothing'}; {wanted}")
        env, meta = made.get("env"), made.get("meta", {})
        if not isinstance(meta, dict) or not (env is None or isinstance(env, str)):
            raise DataError(f"{prefix} returned env {shown(env)} and meta {shown(meta)}; use a string and a dict")
        name = "prompt" if "prompt" in made else "messages"
        return {
            "content": made[name],
            "name": f"the {name} from data.map",
            "answer": made.get("answer"),
            "env": env,
            "meta": meta,
            "tools": made.get("tools"),
            "images": made.get("images"),
        }


def media_of(
    vision: Vision | None,
    messages: list[Message],
    column: Any,
    folder: str | None,
    tokenizer: Any,
    limit: tuple[str, int],
    draft: bool = False,
) -> dict[str, Media]:
    """The images of a row by their ids, which the messages get, too. column: the row's images outside of them. limit:
    the key and the value of the tokens that a row may have, which no image may exceed alone."""
    given = column if isinstance(column, list | tuple) else [] if column is None else [column]
    placed = placed_images(messages, given, tokenizer)
    if placed and vision is None:
        raise DataError(
            "it has images, but the model reads text only: config.json has no vision_config. Set model.path to a "
            f"vision-language model, or remove the images; rename a column {IMAGES!r} with other content"
        )
    images = [image_of(each, folder) for each in placed]
    made = [vision.draft(image) if draft else vision.media(image) for image in images if vision]
    for each in made:
        if each.num_tokens > limit[1]:
            raise DataError(
                f"image {each.source!r} has {each.num_tokens:,} tokens, so no row with it fits into {limit[0]} = "
                f"{limit[1]:,}; raise the limit, make the image smaller, or limit its size in the processor's files"
            )
    return {f"image-{i}": each for i, each in enumerate(made)}


def _after_system(messages: list[Message], system: str | None, name: str, key: str) -> list[Message]:
    """The messages after the system message of the config, if it has one."""
    if system is not None and messages[0]["role"] == "system":
        raise DataError(f"{name} begins with a system message and {key} is set too; keep one")
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _require_open(messages: Sequence[Message], name: str, continues: bool) -> None:
    """Raises: DataError for a conversation that asks for no answer."""
    role = messages[-1]["role"]
    if role == "assistant" and not continues:
        raise DataError(
            f"{name} ends with an answer, {shown(messages[-1]['content'])}: the model would answer twice. Remove it (a "
            "correct answer belongs in data.answer), or set data.continue_last: true to let the model continue it"
        )
    if role in ("system", "developer"):
        raise DataError(f"{name} ends with a message of the role {role!r}; it needs one of the user")


def make_all(rows: Iterator[RawRow], make: Callable[[RawRow], T], left_out: list[str] | None = None) -> list[T]:
    """make(row) of all rows. left_out: gets the errors of bad rows; None = they are raised."""
    made, bad, count, num_unanswered, started = list[T](), list[str](), 0, 0, time.monotonic()
    try:
        for raw in rows:
            count += 1
            try:
                made.append(make(raw))
            except DataError as error:
                bad.append(str(error))
                num_unanswered += isinstance(error, MissingAnswerError)
                if left_out is None and time.monotonic() - started > MAX_READ_S:
                    break
    except DataError as error:  # for a file that can't be read further
        if left_out is not None:
            raise
        bad.append(str(error))
        count += 1
    if left_out is not None and 2 * len(bad) <= count:
        left_out[:], bad = dict.fromkeys([*left_out, *bad]), []
    if not bad:
        return made
    advice = ". If no reward needs a ground truth, set data.answer: null" if num_unanswered == count else ""
    if len(bad) == 1:
        raise DataError(bad[0] + advice)
    raise DataError(f"{len(bad)} of the first {count} rows can't be used{advice}:{listed(bad)}")


def listed(bad: Sequence[str], most: int = MAX_SHOWN) -> str:
    """The first of these errors of rows, each in a line of its own, and the number of the others."""
    more = f"\n  and {len(bad) - most} more" if len(bad) > most else ""
    return "".join(f"\n  {text}" for text in bad[:most]) + more


def is_held_out(messages: Sequence[Message], fraction: float, images: Iterable[str] = ()) -> bool:
    """Whether a row is held out for evaluations. It depends on the text of its user's messages alone, without regard to
    case and white space, and on the names of its images: not on other rows, the order, the seed, a system message or
    the answers."""
    words = content_text([m for m in messages if m["role"] == "user"]).casefold().split()
    digest = hashlib.sha256(" ".join([*words, *images]).encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def _is_held_out(prompt: Prompt, fraction: float) -> bool:
    return is_held_out(prompt.messages or [], fraction, (media.source for media in prompt.media.values()))


def load_prompts(
    path: str | Path | RowTable,
    make: PromptMaker,
    limit: int | None = None,
    split: str | None = None,
    drafts: bool = False,
) -> tuple[list[Prompt], int]:
    """All prompts of a table, rendered once, and the number of those left out as longer than max_prompt_tokens.

    The id is "<file stem>-<line>", or for rows in memory "<name>-<index>". The ordinal is the row's number;
    PromptSource gives a new one to each draw.
    limit: the number of rows to use, from the start. split: of a Hugging Face data set. drafts: after DECODED_S, rows
    with images become drafts, which are never left out as too long.
    """
    table = open_table(path, make.cfg.format, make.cfg.subset, split)
    ordinals, fraction = itertools.count(), make.cfg.eval_fraction
    rows = table.rows(0, limit if fraction is None else None)
    until = time.monotonic() + DECODED_S
    prompts = make_all(rows, lambda raw: make(raw, next(ordinals), drafts and time.monotonic() > until), make.bad)
    require_rows(table, len(prompts))
    if fraction is not None:
        side = [p for p in prompts if _is_held_out(p, fraction) == make.held_out]
        _require_left(table, side, len(prompts), f"data.eval_fraction = {fraction}")
        prompts = side[:limit]
    most = make.cfg.max_prompt_tokens
    lengths = [len(p.ids) for p in prompts if p.ids is not None]
    fitting = [p for p in prompts if p.ids is None or len(p.ids) <= most]
    if lengths and min(lengths) > most:
        raise all_too_long(table.name, lengths, "data.max_prompt_tokens", most)
    return fitting, len(prompts) - len(fitting)


def load_sft_rows(
    path: str | Path | RowTable,
    cfg: SftConfig,
    tokenizer: Any,
    stop_ids: Iterable[int],
    vocab_size: int | None = None,
    bad: list[str] | None = None,
    held_out: list[SftRow] | None = None,
    vision: Vision | None = None,
) -> tuple[list[SftRow], int]:
    """All conversations of a table as rendered rows, without those of eval_fraction, and the number of those left out
    as longer than max_row_tokens.

    vocab_size: of the model that reads the ids, if it is known. bad: as in PromptMaker. held_out: gets the rows of
    eval_fraction. vision: of a vision-language model.
    """
    stops, of_fraction = tuple(stop_ids), set[str]()
    limit = ("sft.max_row_tokens", cfg.max_row_tokens)

    def make(raw: RawRow) -> SftRow:
        raw.require_read()
        column, key = (cfg.prompt, "sft.prompt") if cfg.prompt is not None else (cfg.messages, "sft.messages")
        content, name = column_of(raw.data, column, key, raw.where), f"column {column!r}"
        with as_data_error(f"{raw.where}: "):
            messages = messages_of(content, name, tokenizer.chat_template, raw.is_filled, cfg.prompt is not None)
            media = media_of(vision, messages, raw.data.get(cfg.images or IMAGES), raw.folder, tokenizer, limit)
            if cfg.prompt is not None:
                _require_open(messages, name, False)
                answer = answer_text(column_of(raw.data, cfg.answer, "sft.answer", raw.where), cfg.answer)
                question = _after_system(messages, cfg.system, name, "sft.system")
                messages = [*question, {"role": "assistant", "content": answer}]
            sources = (each.source for each in media.values())
            if cfg.eval_fraction is not None and is_held_out(messages, cfg.eval_fraction, sources):
                of_fraction.add(raw.id)
            tools = tools_of(raw.data.get(cfg.tools or ""), f"column {cfg.tools!r}", raw.is_filled)
            require_rendered(tokenizer, messages, tools, name, "tool_calls", "reasoning_content", "thinking")
            ids, mask = sft_row(tokenizer, messages, stops, tools, media)
            spans = find_spans(ids, media, vision.placeholder) if media and vision is not None else []
        _require_known(ids, tokenizer, vocab_size, raw.where)
        ids.flags.writeable = mask.flags.writeable = False
        return SftRow(id=raw.id, ids=ids, mask=mask, media=media, media_spans=spans)

    table = open_table(path, cfg.format, cfg.subset, cfg.split)
    made = make_all(table.rows(), make, bad)
    require_rows(table, len(made))
    fitting = [row for row in made if len(row.ids) <= cfg.max_row_tokens]
    if not fitting:
        raise all_too_long(table.name, [len(row.ids) for row in made], "sft.max_row_tokens", cfg.max_row_tokens)
    rows = [row for row in fitting if row.id not in of_fraction]
    for side in [rows, fitting[len(rows) :]] if cfg.eval_fraction is not None else []:
        _require_left(table, side, len(fitting), f"sft.eval_fraction = {cfg.eval_fraction}")
    if held_out is not None:
        held_out += [row for row in fitting if row.id in of_fraction]
    return rows, len(made) - len(fitting)


def _require_known(ids: np.ndarray, tokenizer: Any, vocab_size: int | None, where: str) -> None:
    """Raises: DataError for an id outside the model's embedding. A tokenizer may have more ids than the model if no row
    uses them: Gemma 3's text models have no embedding for the image token."""
    if vocab_size is None or len(ids) == 0 or ids.max() < vocab_size:
        return
    at = int(np.argmax(ids >= vocab_size))
    bad = int(ids[at])
    raise DataError(
        f"{where}: token {at} of {len(ids)} is {tokenizer.convert_ids_to_tokens(bad)!r}, id {bad}, but the model's "
        f"embedding ends with id {vocab_size - 1}: the embedding has {vocab_size} ids, the tokenizer {len(tokenizer)}. "
        "Put the tokenizer that the model was trained with into model.path, or make the embedding larger "
        "(resize_token_embeddings, then save_pretrained)"
    )


def require_rows(table: Table, num_rows: int) -> None:
    """Raises: DataError for a table without rows."""
    if num_rows == 0:
        raise DataError(f"{table.name} has no rows; in JSONL each line should be one JSON object")


def _require_left(table: Table, rows: list[T], num_rows: int, fraction: str) -> None:
    if not rows:
        text = "give another share, or more rows with different questions"
        raise ConfigError(f"{table.name}: {fraction} leaves none of {num_rows} rows here; {text}")


def answer_text(answer: Any, column: str) -> str:
    """The answer of a row as the text that is trained. Errors follow the row's place."""
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        blank = "an empty string; give the row an answer, or remove the row"
        fault = blank if isinstance(answer, str) else f"{shown(answer)}; it should be a text or a number"
        raise DataError(f"column {column!r} is {fault}")
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()


def all_too_long(name: str, lengths: list[int], key: str, limit: int) -> DataError:
    """The error for a table whose rows are all too long."""
    return DataError(
        f"{name}: all {len(lengths)} rows are longer than {key} = {limit} tokens "
        f"(shortest {min(lengths)}); raise the limit or shorten the rows. Images count "
        "with all their placeholders; the processor's files limit these, for example by max_pixels"
    )


def _plain(value: Any, name: str, where: str) -> Any:
    """The value, which must be plain JSON: it is sent to reward workers and written to the run's files."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise DataError(
            f"{where}: {name} contains {shown(value)}, which is not plain JSON ({cause}); leave it out or convert "
            "it, with a data.map function or in the file"
        ) from cause
    return value
