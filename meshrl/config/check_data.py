"""Checks of the data: that what the paths name is there, and that it has the columns and splits that are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrl.config.chat_template import is_template_text, require_read, template_text, variables_read_by
from meshrl.config.data import DataConfig
from meshrl.config.data_files import Kind, Look, kind_of, look, look_at_rows
from meshrl.config.places import find
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.source import Problem
from meshrl.core.errors import DataError
from meshrl.core.files import is_there
from meshrl.core.lookup import DOTTED_PATH, can_be_imported

if TYPE_CHECKING:
    from meshrl.config.check import Case


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """The keys of one path and what stands under them. columns: key -> the column it names."""

    path: str
    split_key: str | None
    split: str | None
    format: str
    columns: dict[str, str | None]


def data_problems(case: Case, config: RunConfig) -> Iterator[Problem]:
    """What is wrong with data.*: of the training rows only where they are read, so that an evaluation needs none."""
    data = config.data
    kinds: dict[str, Kind] = {}
    if case.purpose == "train":
        yield from _one_of_path_and_sources(data)
        for table in _training_tables(data):
            yield from _table_problems(case, table, kinds)
    if data.eval_path is not None:
        table = _Table(
            path="data.eval_path",
            split_key="data.eval_split",
            split=data.eval_split,
            format=data.format,
            columns=_columns(data),
        )
        yield from _table_problems(case, table, kinds)
    if data.format != "auto" and kinds and set(kinds.values()) == {"rows"}:
        yield Problem(("data.format",), "would have no effect: all rows are given in memory. Remove it.")
    yield from _subsets(data, kinds)
    yield from _maps(data)
    yield from _answers(case, config)
    yield from _chat_template(case, "data", data.chat_template, data.chat_template_kwargs)
    if data.streaming and data.shuffle and data.shuffle_buffer_rows < config.loop.prompts_per_step:
        yield Problem(
            ("data.shuffle_buffer_rows", "loop.prompts_per_step"),
            "the buffer holds fewer rows than one step draws, so hardly anything would be shuffled. Raise it: its rows "
            "are what memory has to hold.",
        )


def sft_problems(case: Case, config: SftRunConfig) -> Iterator[Problem]:
    """What is wrong with sft.*."""
    columns: dict[str, str | None] = {"sft.messages": config.sft.messages}
    table = _Table(path="sft.path", split_key=None, split=None, format="auto", columns=columns)
    yield from _table_problems(case, table, {})
    yield from _chat_template(case, "sft", config.sft.chat_template, config.sft.chat_template_kwargs)


WRITTEN_BY_MESHRL = ("messages", "tools", "add_generation_prompt")  # variables of a chat template


def _chat_template(case: Case, section: str, given: str | None, variables: dict[str, Any]) -> Iterator[Problem]:
    """Of a template that the config gives: its file and its Jinja. The tokenizer's own is looked at when it loads."""
    key = f"{section}.chat_template"
    for name in WRITTEN_BY_MESHRL:
        if name in variables:
            yield Problem((f"{key}_kwargs.{name}",), "is set by meshrl in each rendering. Leave it out.")
    if given is None:
        return
    path, places = (None, []) if is_template_text(given) else find(case.given[key], case.folder)
    if places and path is None:
        looked = " and ".join(str(place) for place in places)
        yield Problem((key,), f"no such file; looked for {looked}. A template's own text has {{{{ or {{% in it.")
        return
    try:
        reads = variables_read_by(template_text(path or given))
    except DataError as e:
        yield Problem((key,), f"{path or 'the template'} {e}.")
        return
    try:
        require_read([name for name in variables if name not in WRITTEN_BY_MESHRL], reads)
    except DataError as e:
        yield Problem((f"{key}_kwargs", key), f"{e}.")


def unused_data_keys(data: DataConfig) -> dict[str, str]:
    """Keys of data.* that the others leave without effect -> why."""
    found: dict[str, str] = {}
    if data.sources:
        found["data.split"] = "each of data.sources names its own"
        if data.eval_path is None:
            found["data.subset"] = found["data.format"] = "each of data.sources names its own"
    if data.map is not None:
        found["data.prompt"] = found["data.answer"] = "data.map makes the prompt of each row"
    if not data.streaming or not data.shuffle:
        found["data.shuffle_buffer_rows"] = f"data.{'shuffle' if data.streaming else 'streaming'} is false"
    if data.eval_path is None:
        found["data.eval_split"] = found["data.eval_limit"] = "data.eval_path is null"
    return found


def _one_of_path_and_sources(data: DataConfig) -> Iterator[Problem]:
    if data.path is not None and data.sources:
        yield Problem(("data.path", "data.sources"), "give one of the two: a single set, or a mixture of sources.")
    if data.path is None and not data.sources:
        yield Problem(("data.path",), "training needs rows: give a path, or a mixture as data.sources.")
    for name in data.sources:
        if not name.isidentifier():
            yield Problem(("data.sources",), f"the name {name!r} must be one word of letters, digits and underscores.")


def _training_tables(data: DataConfig) -> Iterator[_Table]:
    if data.path is not None:
        yield _Table(
            path="data.path", split_key="data.split", split=data.split, format=data.format, columns=_columns(data)
        )
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        own = {f"{key}.{column}": value for column in ("prompt", "answer") if (value := getattr(source, column))}
        inherited = {f"data.{c}": v for c in ("prompt", "answer") if not getattr(source, c) and (v := getattr(data, c))}
        columns: dict[str, Any] = {} if source.map or data.map else own | inherited
        yield _Table(
            path=f"{key}.path", split_key=f"{key}.split", split=source.split, format=source.format, columns=columns
        )


def _columns(data: DataConfig) -> dict[str, str | None]:
    return {} if data.map else {"data.prompt": data.prompt, "data.answer": data.answer}


def _table_problems(case: Case, table: _Table, kinds: dict[str, Kind]) -> Iterator[Problem]:
    """Notes the table's kind in `kinds`, where there is one."""
    if table.path in case.rows:
        kinds[table.path] = "rows"
        yield from _row_problems(table, case.rows[table.path])
        return
    given = case.given[table.path]
    path, places = find(given, case.folder)
    beside = next((place for place in places if is_there(place.parent)), None)  # a misspelt path there is no hub id
    try:
        kind = kinds[table.path] = kind_of(path or beside or given.value, table.format)
        if table.split is not None and table.split_key and kind in ("jsonl", "parquet"):
            text = f"would have no effect: only Hugging Face sets have splits, and this is {kind}. Remove it."
            yield Problem((table.split_key, table.path), text)
        if kind == "hub" or path is None:
            return  # only the hub knows
        seen = look(path, kind, table.split)
    except DataError as e:
        looked = f"; looked for {' and '.join(str(place) for place in places)}" if path is None else ""
        yield Problem((table.path,), f"{e}{looked}.")
        return
    yield from _missing_columns(table, seen, "in the file; it has")


def _row_problems(table: _Table, rows: Sequence[Any]) -> Iterator[Problem]:
    """As _table_problems, of rows in memory."""
    if table.split is not None and table.split_key:
        text = "would have no effect: only Hugging Face sets have splits, and these are rows in memory. Remove it."
        yield Problem((table.split_key, table.path), text)
    try:
        seen = look_at_rows(rows)
    except DataError as e:
        yield Problem((table.path,), f"{e}.")
    else:
        yield from _missing_columns(table, seen, "in the first row; it has")


def _missing_columns(table: _Table, seen: Look, where: str) -> Iterator[Problem]:
    for key, name in table.columns.items():
        if name is not None and name not in seen.columns:
            there = ", ".join(repr(column) for column in seen.columns)
            unneeded = " If no reward needs an answer, set data.answer: null." if key == "data.answer" else ""
            yield Problem((key, table.path), f"no column {name!r} {where} {there}.{unneeded}")


def _subsets(data: DataConfig, kinds: dict[str, Kind]) -> Iterator[Problem]:
    why = "would have no effect: only sets on the Hugging Face hub have subsets. Remove it."
    served = {kinds[key] for key in ("data.path", "data.eval_path") if key in kinds}
    if data.subset is not None and served and "hub" not in served:
        yield Problem(("data.subset",), why)
    for name, source in data.sources.items():
        if source.subset is not None and kinds.get(f"data.sources.{name}.path", "hub") != "hub":
            yield Problem((f"data.sources.{name}.subset", f"data.sources.{name}.path"), why)


def _answers(case: Case, config: RunConfig) -> Iterator[Problem]:
    """Rewards that need an answer, over sets of which no column with one is named. What a map returns is seen later."""
    data, kinds = config.data, case.known.get("needs_answer", set())
    terms = {f"reward.terms.{name}.kind": term.kind for name, term in config.reward.terms.items() if term.kind in kinds}
    if not terms or data.answer is not None:
        return
    training = case.purpose == "train"
    unnamed = [
        f"data.sources.{name}.answer"
        for name, source in data.sources.items()
        if training and source.answer is None and not (source.map or data.map)
    ]
    if unnamed or (data.map is None and ((training and data.path is not None) or data.eval_path is not None)):
        yield Problem(
            ("data.answer", *unnamed, *terms),
            f"{' and '.join(sorted({*terms.values()}))} compares each completion with the answer of its row, and null "
            "names no column for it. Name the column with the ground truth, or use a reward that needs none.",
        )


def _maps(data: DataConfig) -> Iterator[Problem]:
    named = {"data.map": data.map}
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        named[f"{key}.map"] = source.map
        for column in ("prompt", "answer"):
            if (source.map or data.map) and getattr(source, column) is not None:
                by = f"{key}.map" if source.map else "data.map"
                yield Problem((f"{key}.{column}", by), "would have no effect: the map makes the prompt of each row.")
    for key, function in named.items():
        if function is None:
            continue
        if not DOTTED_PATH.fullmatch(function):
            yield Problem((key,), "must be a function as package.module:name; it gets a row and returns a prompt.")
        elif not can_be_imported(function):
            yield Problem((key,), "no such module, neither installed nor in the working folder.")
