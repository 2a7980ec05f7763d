"""`meshrl view RUN --terminal`: steps, groups and answers, driven by keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.cli import main
from meshrl.core.errors import Failure
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import read_tokens, tokens_file
from tests.made_runs import answer, decode, made_run

pytest.importorskip("textual", reason="textual is not installed: pip install 'meshrl[view]'")

from textual.widgets import DataTable, Footer, Static

from meshrl.tools.viewer.terminal import RolloutViewer
from meshrl.tools.viewer.text import tinted

HOSTILE = "[red]\x1b[2J\u202e<script>[/nope]"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = made_run(tmp_path / "run", {0: [0, 1], 2: [1, 1]}, [0.5, 0.5])
    groups = [
        [answer("short", "yes", 1.0), answer("short", "no", 0.0, 1)],
        [answer("medium", "Needle " + "word " * 9, 0.25)],
        [answer(HOSTILE, HOSTILE, -1.0)],
    ]
    RolloutLog(folder, decode).write(2, [one for group in groups for one in group])
    return folder


def drive(run: Path, check: Callable[[Any, Any], Awaitable[None]]) -> None:
    async def driven() -> None:
        app = RolloutViewer(run)
        async with app.run_test(size=(160, 40)) as pilot:
            await pilot.pause()
            await check(app, pilot)

    asyncio.run(driven())


def prompts(app: RolloutViewer) -> list[str]:
    table = app.query_one(DataTable)
    return [str(table.get_row_at(i)[0]) for i in range(table.row_count)]


def drawn(app: RolloutViewer) -> str:
    """The characters on the screen."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in lines)


def title(app: RolloutViewer) -> str:
    return str(app.query_one("#title", Static).content)


def test_the_last_step_is_shown_first_with_the_answers_of_a_group_side_by_side(run):
    async def check(app, pilot):
        assert "rollouts of step 2: 3 of 3 prompts, by order" in title(app)
        assert prompts(app)[:2] == ["short", "medium"]
        screen = drawn(app)
        assert (
            "answer 2/1/0: reward 1" in screen and "answer 2/1/1: reward 0" in screen and "expected answer:" in screen
        )
        (line,) = [line for line in screen.splitlines() if " yes " in line]
        assert " no " in line
        footer = {binding.description for binding in app.query_one(Footer).query("FooterKey")}
        assert {"next step", "search", "wrong only", "sort", "quit"} <= footer

    drive(run, check)


def test_keys_change_the_step_the_group_the_sort_and_the_filter(run):
    async def check(app, pilot):
        await pilot.press("down")
        await pilot.pause()
        assert "Needle word" in drawn(app)
        await pilot.press("s")
        assert "by lowest reward" in title(app) and prompts(app)[1:] == ["medium", "short"]
        await pilot.press("s")
        assert "by highest reward" in title(app) and prompts(app)[:2] == ["short", "medium"]
        await pilot.press("s")
        assert "by longest" in title(app) and prompts(app)[0] == "medium"
        await pilot.press("w")
        assert "wrong answers only" in title(app) and prompts(app)[0] == "medium" and len(app.shown[-1][1]) == 1
        await pilot.press("w", "p")
        assert "evaluation after step 2" in title(app)
        await pilot.press("p", "p")
        assert "evaluation after step 0" in title(app) and prompts(app) == ["q0", "q1"]
        await pilot.press("p")
        assert "rollouts of step 2" in title(app)
        await pilot.press("n", "n")
        assert "rollouts of step 1" in title(app)

    drive(run, check)


def test_a_search_finds_prompts_and_answers_and_ends_with_escape(run):
    async def check(app, pilot):
        await pilot.press("slash", *"NEEDLE")
        await pilot.pause()
        assert prompts(app) == ["medium"] and "1 of 3 prompts" in title(app)
        await pilot.press(*"xx")
        await pilot.pause()
        assert prompts(app) == [] and "Needle word" not in drawn(app)
        await pilot.press("escape", "down")
        await pilot.pause()
        assert len(prompts(app)) == 3

    drive(run, check)


def test_hostile_texts_are_shown_as_text(run):
    """Of prompts, answers and their tokens, tools, names of terms, failures; also a very long word."""
    shown = "[red]\\x1b[2J\\u202e<script>[/nope]"
    tool = {"role": HOSTILE, "content": [HOSTILE], "tool_calls": [HOSTILE]}
    bad = answer(HOSTILE, HOSTILE + "w" * 5000, 1.0, messages=[tool])
    bad.rewards = {HOSTILE: 1.0, "other": Failure(kind=HOSTILE, message=HOSTILE)}
    bad.failure = Failure(kind="agent", message=HOSTILE)
    RolloutLog(run, decode).write(3, [bad])

    async def check(app, pilot):
        for _ in range(3):
            await pilot.pause()
            screen = drawn(app)
            assert screen.replace(" ", "").replace("\n", "").count("\\x1b[2J\\u202e") >= 8, screen
            assert shown in screen and not {*"\x1b\u202e\x00"} & {*screen}
            await pilot.press("c")
        await pilot.press("slash", *"[red")
        assert prompts(app) == [shown] and "1 of 1 prompt, " in title(app)

    drive(run, check)


def test_a_damaged_file_shows_the_lines_before_the_damage(run):
    path = run / "rollouts" / "step_000002.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n{}\n")

    async def check(app, pilot):
        assert "step_000002.jsonl:2: schema None" in title(app) and prompts(app) == ["short"]

    drive(run, check)


def test_a_run_without_rollouts_is_refused(tmp_path, capsys):
    assert main(["view", str(made_run(tmp_path / "sft")), "--terminal"]) == 1
    assert "has no rollouts" in capsys.readouterr().err


def test_tokens_are_coloured_by_a_chosen_value_if_they_have_one(run):
    colours = "sampler logprob", "trainer logprob", "log ratio", "entropy", "advantage", "version", "loss mask"
    first = answer("short", "a\x1b!", 1.0)
    first.turns[0].logprobs = np.array([-1.0, -0.5, 0.0], np.float32)
    path = RolloutLog(run, decode).write(2, [first])

    async def coloured(app, pilot):
        for name in colours:
            await pilot.press("c")
            await pilot.pause()
            assert f"tokens by {name}" in title(app) and "a\\x1b!" in drawn(app)
        await pilot.press("c")
        assert "tokens by" not in title(app)

    async def not_coloured(app, pilot):
        await pilot.press("c")
        await pilot.pause()
        assert "a\\x1b!" in drawn(app)

    drive(run, coloured)
    (values,) = read_tokens(path, first.id)
    by_logprob = tinted("a\x1b!", values, "sampler logprob")
    assert by_logprob.plain == "a\\x1b!"
    assert [(s.start, s.end, s.style) for s in by_logprob.spans] == [
        (0, 1, "on rgb(150,0,0)"),
        (1, 5, "on rgb(75,0,0)"),
        (5, 6, "on rgb(0,0,0)"),
    ]
    assert {span.style for span in tinted("a\x1b!", values, "entropy").spans} == {"dim"}
    tokens_file(path).write_bytes(b"damaged")
    drive(run, not_coloured)
    tokens_file(path).unlink()
    drive(run, not_coloured)


def test_without_a_terminal_the_viewer_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["view", str(run), "--terminal"]) == 2
    assert "--terminal needs a terminal" in capsys.readouterr().err
