"""Checks of the data before a run starts its ranks or imports torch: whether the paths name tables with the columns and
splits that the config names, and whether a chat template can be used. They are made together with the checks of the
config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.config.case import Case, Problem
from meshrl.config.data import DataConfig, NamedRows
from meshrl.config.loop import SftConfig
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import DataError
from meshrl.core.files import is_there
from meshrl.data.chat import is_template_text, require_read, template_text, variables_read_by
from meshrl.data.files import Kind, files_of, kind_of
from meshrl.data.tables import RowTable, column_names, open_table

WRITTEN_BY_MESHRL = ("messages", "tools", "add_generation_prompt", "strftime_now")  # variables of a chat template
MAX_COUNTED_BYTES = 1 << 30  # of JSONL, whose rows are counted by reading them


@dataclass(frozen=True, slots=True)
class _ConfiguredTable:
    """A table that a section of the config names. columns: column names by their keys. prefix: "" or "eval_", of the
    keys of its path and split."""

    section: str
    slice: DataConfig | SftConfig | NamedRows
    columns: dict[str, str | None]
    prefix: str = ""

    @property
    def path(self) -> str:
        return f"{self.section}.{self.prefix}path"

    @property
    def split(self) -> str | None:
        return self.slice.split if isinstance(self.slice, NamedRows) or not self.prefix else self.slice.eval_split


def check_data(case: Case) -> Iterator[Problem]:
    """Problems of the data. Training rows are checked only for training: an evaluation does not need them."""
    section = _section(case.config)
    if isinstance(section, SftConfig):
        columns: dict[str, str | None] = {"sft.prompt": section.prompt, "sft.answer": section.answer}
        columns = {"sft.messages": section.messages} if section.prompt is None else columns
        prefixes = [""] if section.eval_path is None else ["", "eval_"]
        name, tables = "sft", [_ConfiguredTable("sft", section, columns, prefix) for prefix in prefixes]
        if section.eval_path is not None and section.eval_fraction is not None:
            keys, why = ("sft.eval_path", "sft.eval_fraction"), "both hold out rows"
            yield Problem(keys, f"{why}: give only one of the two.", void=keys, reason=why)
    else:
        name, tables = "data", list(_tables(section, case.purpose == "train" or section.eval_fraction is not None))
    kinds: dict[str, Kind] = {}
    for table in tables:
        yield from _table_problems(case, table, kinds)
    if section.format != "auto" and kinds and set(kinds.values()) == {"rows"}:
        yield Problem((f"{name}.format",), "would have no effect: all rows are given in memory. Remove it.")
    for owner in dict.fromkeys(table.section for table in tables if table.slice.subset is not None):
        paths = [table.path for table in tables if table.section == owner]
        its_kinds = {kinds[path] for path in paths if path in kinds}
        if its_kinds and "hub" not in its_kinds:
            key, reason = f"{owner}.subset", "only data sets on the Hugging Face hub have subsets"
            yield Problem((key, *paths), f"would have no effect: {reason}. Remove it.", void=(key,), reason=reason)
    yield from _chat_template(case, name, section.chat_template, section.chat_template_kwargs)


def count_rows(config: RunConfig | SftRunConfig) -> int | None:
    """Rows of the training table; None for a mixture, whose tables have separate epochs, and where counting takes
    long."""
    section = _section(config)
    if section.path is None:
        return None
    kind = kind_of(section.path, section.format)
    files = files_of(Path(section.path), kind) if kind == "jsonl" else []
    if kind == "hub" or sum(file.stat().st_size for file in files) > MAX_COUNTED_BYTES:
        return None
    return open_table(section.path, section.format, split=section.split).num_rows


def _section(config: RunConfig | SftRunConfig) -> DataConfig | SftConfig:
    return config.sft if isinstance(config, SftRunConfig) else config.data


def _tables(data: DataConfig, training: bool) -> Iterator[_ConfiguredTable]:
    own: dict[str, str | None] = {"data.prompt": data.prompt, "data.answer": data.answer, "data.images": data.images}
    columns = {} if data.map else own
    if training and data.path is not None:
        yield _ConfiguredTable("data", data, columns)
    for key, source in data.named(training).items():
        source_columns: dict[str, str | None] = {
            f"{key}.{column}" if getattr(source, column) else f"data.{column}": getattr(source, column) or value
            for column, value in (("prompt", data.prompt), ("answer", data.answer))
        }
        yield _ConfiguredTable(key, source, {} if source.map or data.map else source_columns)
    if data.eval_path is not None:
        yield _ConfiguredTable("data", data, columns, "eval_")


def _table_problems(case: Case, table: _ConfiguredTable, kinds: dict[str, Kind]) -> Iterator[Problem]:
    """Problems of one table. Stores the table's kind in `kinds`, if it has one."""
    source: RowTable | Path | None
    kind: Kind
    if table.path in case.rows:
        source, kind = RowTable("rows", case.rows[table.path]), "rows"
    else:
        source, places = case.find(table.path)
        # A misspelt path in a folder that exists is not a hub id.
        in_folder = next((place for place in places if is_there(place.parent)), None)
        try:
            kind = kind_of(source or in_folder or case.given[table.path].value, table.slice.format)
        except DataError as e:
            looked = f"; looked for {' and '.join(str(place) for place in places)}" if source is None else ""
            yield Problem((table.path,), f"{e}{looked}.")
            return
    kinds[table.path] = kind
    if table.split is not None and kind not in ("datasets", "hub"):
        these = "these are rows in memory" if kind == "rows" else f"this is {kind}"
        reason, key = f"only Hugging Face data sets have splits, and {these}", f"{table.section}.{table.prefix}split"
        yield Problem((key, table.path), f"would have no effect: {reason}. Remove it.", void=(key,), reason=reason)
    if kind == "hub" or source is None:
        return  # only the hub knows its rows
    try:
        first = open_table(source, table.slice.format, split=table.split).first()
    except DataError as e:
        yield Problem((table.path,), f"{e}.")
        return
    if first is None:
        yield Problem((table.path,), "has no rows.")
        return
    if first.fault:
        if _section(case.config).bad_rows == "error":
            yield Problem((table.path,), f"{first.fault}.")
        return
    there = column_names(first.data)
    for key, name in table.columns.items():
        if name is not None and name not in there:
            unneeded = " If no reward needs an answer, set data.answer: null." if key == "data.answer" else ""
            text = f"no column {name!r} in the first row; it has {', '.join(map(repr, there))}.{unneeded}"
            yield Problem((key, table.path), text)


def _chat_template(case: Case, section: str, template: str | None, variables: dict[str, Any]) -> Iterator[Problem]:
    """Problems of a template in the config: of its file and Jinja. The tokenizer's own is checked when it loads."""
    key = f"{section}.chat_template"
    for name in WRITTEN_BY_MESHRL:
        if name in variables:
            yield Problem((f"{key}_kwargs.{name}",), "is set by meshrl in each rendering. Leave it out.")
    if template is None:
        return
    path, places = (None, []) if is_template_text(template) else case.find(key)
    if places and path is None:
        looked = " and ".join(str(place) for place in places)
        yield Problem(
            (key,),
            f"no such file; looked for {looked}. The text of a template has {{{{ or {{% in it; chatml and "
            "chatml_tools are built in.",
        )
        return
    try:
        reads = variables_read_by(template_text(path or template))
    except DataError as e:
        yield Problem((key,), f"{path or 'the template'} {e}.")
        return
    for name in variables:
        try:
            require_read([name] if name not in WRITTEN_BY_MESHRL else [], reads)
        except DataError as e:
            variable = f"{key}_kwargs.{name}"
            yield Problem((variable, key), f"{e}.", void=(variable,), reason="the chat template does not read it")
