"""`meshrl view RUN --terminal`: steps, groups and answers side by side, for a machine without a browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, HorizontalScroll, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from meshrl.core.errors import MeshrlError
from meshrl.core.terminal import printable
from meshrl.monitor.rollout_log import LoggedTrajectory
from meshrl.monitor.token_log import TokenValues, read_tokens
from meshrl.tools.runs import answer_files
from meshrl.tools.viewer.text import Answers, answer_parts, question_parts, read_answers, sampled_text

Answered = list[LoggedTrajectory]
_SORTS: dict[str, Callable[[Answered], float]] = {
    "order": lambda group: 0.0,
    "lowest reward": lambda group: mean_reward(group),
    "highest reward": lambda group: -mean_reward(group),
    "longest": lambda group: -max(sum(len(t.output_ids) for t in one.trajectory.turns) for one in group),
}


def mean_reward(group: Answered) -> float:
    """The mean of the known rewards; infinite when there is none."""
    known = [one.trajectory.reward for one in group if one.trajectory.reward is not None]
    return sum(known) / len(known) if known else math.inf


_COLOURS = ("none", "sampler logprob", "trainer logprob", "log ratio", "entropy", "advantage", "version", "loss mask")


def tinted(text: str, values: TokenValues, colour: str) -> Text:
    """The text of a turn with a background for each token: green for values above 0, red for those below it, stronger
    for larger ones. Tokens without this value are dim."""
    columns = values.columns
    found = {
        "sampler logprob": columns["rollout_logprobs"],
        "trainer logprob": columns["logprobs"],
        "log ratio": columns["logprobs"] - columns["rollout_logprobs"],
        "entropy": columns["entropies"],
        "advantage": columns["advantages"],
        "version": columns["versions"] - columns["versions"].min(initial=0),
        "loss mask": columns["trained"],
    }[colour].astype(float)
    largest = np.abs(found[np.isfinite(found)]).max(initial=0.0) or 1.0
    out, at = Text(), 0
    for size, value in zip(columns["characters"].tolist(), found.tolist()):
        strength = round(150 * abs(value) / largest) if math.isfinite(value) else 0
        style = f"on rgb({strength},0,0)" if value < 0 else f"on rgb(0,{strength},0)"
        out.append(printable(text[at : at + size]), style if math.isfinite(value) else "dim")
        at += size
    return out


class RolloutViewer(App[None]):
    """One step or evaluation at a time: its groups at the left, the answers of the chosen one at the right."""

    CSS_PATH = "terminal.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        ("p", "go(-1)", "previous step"),
        ("n", "go(1)", "next step"),
        ("slash", "search", "search"),
        ("escape", "leave", "end search"),
        ("w", "wrong", "wrong only"),
        ("s", "sort", "sort"),
        ("c", "colour", "colour of tokens"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, run: Path):
        super().__init__()
        self._run = run
        files = [(step, kind) for kind in ("eval", "step") for step in answer_files(run, kind)]
        self._files = sorted(files)  # an evaluation is shown before the step of the same number
        self._at, self._wrong, self._sort, self._words = len(files) - 1, False, 0, ""
        self._colour = 0
        self._answers = Answers("", [], "")
        self.shown: list[Answered] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Input(placeholder="text in a prompt or an answer", id="filter")
        with Horizontal():
            yield DataTable(id="groups", cursor_type="row")
            with Vertical():
                yield VerticalScroll(Static(id="asked"), id="question")
                yield HorizontalScroll(id="answers")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns("prompt", "reward", "tokens")
        self.query_one(DataTable).focus()
        self._load()

    def _load(self) -> None:
        step, kind = self._files[self._at]
        self._answers = read_answers(self._run, kind, step, self._wrong)
        self._list()

    def _list(self) -> None:
        """Fill the list of groups with those that have the searched text."""
        sort, order = list(_SORTS.items())[self._sort]
        found = [group for group in self._answers.groups if any(self._words in text.lower() for text in _texts(group))]
        self.shown = sorted(found, key=order)
        state = [f"{len(self.shown)} of {len(self._answers.groups)} prompts, by {sort}"]
        state += [f"with {self._words!r}"] * bool(self._words) + ["wrong only"] * self._wrong
        state += [f"tokens by {_COLOURS[self._colour]}"] * bool(self._colour)
        error = f"\nthe rest can't be read: {self._answers.error}" if self._answers.error else ""
        self.query_one("#title", Static).update(printable(f"{self._answers.title}: {', '.join(state)}{error}"))
        table = self.query_one(DataTable)
        table.clear()
        for group in self.shown:
            tokens = max(sum(len(t.output_ids) for t in one.trajectory.turns) for one in group)
            prompt = " ".join(next(_texts(group)).split())[:28]
            reward = mean_reward(group)
            table.add_row(Text(printable(prompt)), "none" if reward == math.inf else f"{reward:.3g}", str(tokens))
        if not self.shown:
            self.query_one("#asked", Static).update("")
            self.query_one("#answers").remove_children()

    async def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the answers of the chosen group."""
        place = self.query_one("#answers")
        await place.remove_children()
        if event.cursor_row < len(self.shown):
            group = self.shown[event.cursor_row]
            self.query_one("#asked", Static).update(Group(*question_parts(group[0].trajectory.prompt)))
            parts = (answer_parts(one, self._tokens(one)) for one in group)
            await place.mount_all(VerticalScroll(Static(Group(*part)), classes="answer") for part in parts)

    def _tokens(self, logged: LoggedTrajectory) -> list[Text]:
        """The texts of the turns with a colour for each token; empty without a colour, or without token values."""
        if not self._colour:
            return []
        step, kind = self._files[self._at]
        try:
            values = read_tokens(answer_files(self._run, kind)[step], logged.trajectory.id)
        except MeshrlError:  # the texts are shown all the same
            return []
        complete = len(values) == len(logged.texts)
        return (
            [tinted(text, one, _COLOURS[self._colour]) for text, one in zip(logged.texts, values)] if complete else []
        )

    def action_go(self, by: int) -> None:
        self._at = min(max(self._at + by, 0), len(self._files) - 1)
        self._load()

    def action_wrong(self) -> None:
        self._wrong = not self._wrong
        self._load()

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(_SORTS)
        self._list()

    def action_colour(self) -> None:
        self._colour = (self._colour + 1) % len(_COLOURS)
        row = self.query_one(DataTable).cursor_row
        self._list()
        self.query_one(DataTable).move_cursor(row=row)

    def action_search(self) -> None:
        self.query_one(Input).add_class("open").focus()

    def action_leave(self) -> None:
        self.query_one(Input).remove_class("open").value = ""
        self.query_one(DataTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._words = event.value.lower()
        self._list()

    def on_input_submitted(self) -> None:
        self.query_one(DataTable).focus()


def _texts(group: Answered) -> Iterator[str]:
    """The texts that are searched: the prompt, then its answers."""
    prompt = group[0].trajectory.prompt
    yield " ".join(str(message.get("content")) for message in prompt.messages or ()) or prompt.id
    yield from map(sampled_text, group)
