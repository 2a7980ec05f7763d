"""`meshrl view RUN --terminal`: steps, groups and answers side by side, for a machine without a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, HorizontalScroll, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from meshrl.core.errors import MeshrlError
from meshrl.core.terminal import counted, printable
from meshrl.monitor.rollout_log import LoggedTrajectory
from meshrl.monitor.token_log import read_tokens
from meshrl.tools.viewer.answers import read_answers
from meshrl.tools.viewer.page import rollout_files
from meshrl.tools.viewer.text import COLOURS, answer_parts, question_parts, sampled_text, tinted

Answered = list[LoggedTrajectory]
_SORTS = {
    "order": lambda group: 0.0,
    "lowest reward": lambda group: _mean_reward(group),
    "highest reward": lambda group: -_mean_reward(group),
    "longest": lambda group: -_longest(group),
}


def _mean_reward(group: Answered) -> float:
    rewards = [logged.trajectory.reward for logged in group if logged.trajectory.reward is not None]
    return sum(rewards) / len(rewards) if rewards else math.inf


def _longest(group: Answered) -> int:
    return max(sum(len(turn.output_ids) for turn in logged.trajectory.turns) for logged in group)


def _texts(group: Answered) -> Iterator[str]:
    """The texts that are searched: the prompt, then its answers."""
    prompt = group[0].trajectory.prompt
    yield " ".join(str(message.get("content")) for message in prompt.messages or ()) or prompt.id
    yield from map(sampled_text, group)


class RolloutViewer(App[None]):
    """One step or evaluation at a time: its groups at the left, the answers of the chosen one at the right."""

    CSS_PATH = "terminal.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        ("p", "change('file', -1)", "previous step"),
        ("n", "change('file', 1)", "next step"),
        ("slash", "search", "search"),
        ("escape", "leave", "end search"),
        ("w", "change('wrong', 1)", "wrong only"),
        ("s", "change('sort', 1)", "sort"),
        ("c", "change('colour', 1)", "colour of tokens"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, run: Path):
        super().__init__()
        self._run, self._words = run, ""
        self._files = files = rollout_files(run)
        self._chosen = {"file": len(files) - 1, "wrong": 0, "sort": 0, "colour": 0}
        self._counts = {"file": len(files), "wrong": 2, "sort": len(_SORTS), "colour": len(COLOURS)}
        self.shown: list[tuple[str, Answered]] = []

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
        self.action_change("file", 0)

    def action_change(self, choice: str, by: int) -> None:
        """Choose another file, order, colour, or all answers or only wrong ones."""
        self._chosen[choice] = (self._chosen[choice] + by) % self._counts[choice]
        if choice in ("file", "wrong"):
            file = self._files[self._chosen["file"]]
            self._answers = read_answers(self._run, file.kind, file.step, bool(self._chosen["wrong"]))
        row = self.query_one(DataTable).cursor_row
        self._list()
        if choice == "colour":
            self.query_one(DataTable).move_cursor(row=row)

    def _list(self) -> None:
        """Fill the list of groups with those that have the searched text."""
        answers, sort = self._answers, list(_SORTS)[self._chosen["sort"]]
        self.shown = [
            (name, group)
            for name, group in sorted(answers.groups.items(), key=lambda item: _SORTS[sort](item[1]))
            if any(self._words in text.lower() for text in _texts(group))
        ]
        state = [f"{len(self.shown)} of {counted(len(answers.groups), 'prompt')}, by {sort}"]
        state += [f"with {self._words!r}"] * bool(self._words)
        state += [f"tokens by {COLOURS[self._chosen['colour']]}"] * bool(self._chosen["colour"])
        title = f"{answers.title}: {', '.join(state)}\n{answers.error}".rstrip()
        self.query_one("#title", Static).update(printable(title))
        table = self.query_one(DataTable)
        table.clear()
        for _, group in self.shown:
            prompt, reward = " ".join(next(_texts(group)).split())[:28], _mean_reward(group)
            table.add_row(Text(printable(prompt)), "none" if reward == math.inf else f"{reward:.3g}", _longest(group))
        if not self.shown:
            self.query_one("#asked", Static).update("")
            self.query_one("#answers").remove_children()

    async def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the answers of the chosen group."""
        place = self.query_one("#answers")
        await place.remove_children()
        if event.cursor_row < len(self.shown):
            name, group = self.shown[event.cursor_row]
            self.query_one("#asked", Static).update(Group(*question_parts(group[0].trajectory.prompt)))
            parts = (answer_parts(name, logged, self._tokens(logged)) for logged in group)
            await place.mount_all(VerticalScroll(Static(Group(*part)), classes="answer") for part in parts)

    def _tokens(self, logged: LoggedTrajectory) -> list[Text]:
        """The texts of the turns with a colour for each token; empty without a colour, or without token values."""
        try:
            chosen, path = self._chosen["colour"], self._files[self._chosen["file"]].path
            values = read_tokens(path, logged.trajectory.id) if chosen else []
        except MeshrlError:  # the texts are shown all the same
            return []
        if len(values) != len(logged.texts):  # no file, or one of other rollouts
            return []
        return [tinted(text, turn, COLOURS[chosen]) for text, turn in zip(logged.texts, values)]

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
