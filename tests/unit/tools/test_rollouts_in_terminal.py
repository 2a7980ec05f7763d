"""`meshrl view RUN --step N` and `--eval`: answers as text, for terminals and pipes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from golden import check_golden

from meshrl.cli import main
from meshrl.core.errors import Failure
from meshrl.core.types import Times
from meshrl.monitor.rollout_log import RolloutLog
from tests.made_runs import about_image, answer, decode, image_media, made_run, settings

HOSTILE = "\x1b[2J<script>\u202egnp.exe\x00\ud800\r\n\tend [bold]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two evaluations, and a step with tools, failures and hostile texts."""
    folder = made_run(tmp_path / "run", {0: [0, 0], 2: [1, 0]}, [0.25, 0.5])
    tools = answer("6*7?", "<call>6*7</call>", 1.0)
    tools.turns += answer("6*7?", "It is 42.", 1.0, messages=[{"role": "tool", "content": "42.0"}]).turns
    tools.turns += answer("6*7?", "Again: 42.", 1.0, messages=[{"role": "user", "content": "Sure?"}]).turns
    for turn, parent in zip(tools.turns, (-1, 0, 0)):
        turn.parent = parent
    tools.turns[1].times = Times(queue_s=0.25, prefill_s=0.5, decode_s=1.0, cached_tokens=7, total_s=2.0, tool_s=0.5)
    tools.turns[1].source, tools.metrics = "POST /v1/messages 1a2b3c4d", {"steps": 3.5}
    ungraded = answer("6*7?", "two\nlines", 0.0, index=1)
    ungraded.rewards["correct"], ungraded.reward = Failure(kind="timeout", message="slow grader"), None
    hostile = answer(HOSTILE, HOSTILE, -1.0)
    silent = answer("6*7?", "no messages", 0.0, index=2)
    silent.rewards["form"] = None
    silent.turns[0].messages = []
    RolloutLog(folder, decode).write(3, [tools, ungraded, silent, hostile])
    return folder


def test_a_step_is_printed_with_prompts_answers_rewards_tools_and_failures(run, capsys):
    assert main(["view", str(run), "--step", "-1"]) == 0
    printed = capsys.readouterr().out
    check_golden("view_printed.txt", printed, run)
    assert printed.isprintable() is False and not set("\x1b\u202e\x00\r\t") & set(printed), "control characters"


def test_the_wrong_answers_of_the_last_or_a_chosen_evaluation(run, capsys):
    assert main(["view", str(run), "--eval", "--wrong"]) == 0
    printed = capsys.readouterr().out
    assert "evaluation after step 2, wrong answers only: 1 of 2 prompts, 1 answer, mean" in printed
    assert "0 at 2" in printed and "1 at 2" not in printed
    assert "prompt 2 of 2: q1" in printed and "answer eval_2/2/0:" in printed, "as without --wrong"
    assert main(["view", str(run), "--eval", "0"]) == 0
    assert "evaluation after step 0: 2 prompts, 2 answers, mean reward 0\n" in capsys.readouterr().out
    assert main(["view", str(run), "--eval", "1"]) == 1
    assert "has no evaluation after step 1 (loop.eval_every_steps); there are: 0, 2" in capsys.readouterr().err
    assert main(["view", str(run), "--step", "7"]) == 1
    assert "has no rollouts of step 7 (monitor.rollout_log_every_steps); there are: 1, 2, 3" in capsys.readouterr().err


def test_the_texts_alone_are_a_line_for_each_answer(run, capsys):
    assert main(["view", str(run), "--step", "3", "--text"]) == 0
    lines = capsys.readouterr().out.split("\n")
    hostile = "\\x1b[2J<script>\\u202egnp.exe\\x00?\\x0d\\n\tend [bold]"
    assert lines == ["<call>6*7</call>\\nIt is 42.\\nAgain: 42.", "two\\nlines", "no messages", hostile, ""]


@pytest.mark.parametrize(("no_color", "colour"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_and_lines_of_its_width_but_not_with_no_color(
    run, monkeypatch, no_color: str, colour: bool
):
    long = answer("long", "word " * 60, 1.0)
    RolloutLog(run, decode).write(4, [long])
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    assert main(["view", str(run), "--step", "4"]) == 0
    printed = sys.stdout.getvalue()
    assert ("\x1b[32m" in printed) is colour
    words = [line for line in printed.splitlines() if "word" in line]
    assert len(words) > 5 and all(line.startswith("    word") and len(line) <= 50 for line in words)


def test_a_pipe_gets_complete_lines(run, capsys):
    RolloutLog(run, decode).write(4, [answer("long", "word " * 60 + "x" * 5000, 1.0)])
    assert main(["view", str(run), "--step", "4"]) == 0
    assert f"    {'word ' * 60}{'x' * 5000}\n" in capsys.readouterr().out


def test_the_reader_of_a_pipe_may_end_early(run, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["view", str(run), "--step", "3"]) == 0


def test_the_lines_before_a_damaged_one_are_shown(run, capsys):
    path = run / "rollouts" / "step_000003.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({"schema": 99}), lines[1]]) + "\n")
    assert main(["view", str(run), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "It is 42." in printed and "two\n" not in printed
    assert "step_000003.jsonl:2: schema 99" in printed and "the file is shown up to there" in printed


def test_an_incomplete_line_is_named(run, capsys):
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_bytes(path.read_bytes()[:200])
    assert main(["view", str(run), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "0 prompts, 0 answers" in printed and "step_000003.jsonl:1: the line is incomplete" in printed
    assert main(["view", str(run), "--step", "3", "--text"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "step_000003.jsonl:1: the line is incomplete" in captured.err


def test_a_run_without_rollouts_and_a_missing_run_are_explained(tmp_path, capsys):
    sft = made_run(tmp_path / "sft", config=settings(sft__path="rows.jsonl"))
    empty = made_run(tmp_path / "empty")
    for options in ([], ["--step", "1"], ["--eval"], ["--attention", "1/1/0"]):
        for place, error in (
            (sft, f"{sft} is a run of supervised fine-tuning, which samples no answers, so it has no rollouts\n"),
            (empty, f"{empty} has no rollouts: no step has ended yet, or monitor.rollout_log_every_steps is 0\n"),
            (tmp_path, f"{tmp_path} is not a run's folder: it has no metrics.jsonl. It contains 2 runs, such as"),
            (sft / "config.yaml", f"{sft / 'config.yaml'} is a file; give the folder of a run, such as runs/NAME\n"),
            (tmp_path / "stf", f"{tmp_path / 'stf'} does not exist; give the folder of a run, such as runs/NAME; did"),
        ):
            assert main(["view", str(place), *options]) == 1
            assert capsys.readouterr().err.startswith(f"meshrl: {error}")


def test_images_of_a_prompt_are_named_with_their_tokens_and_thumbnails(tmp_path: Path, capsys):
    folder = made_run(tmp_path / "run", {}, [0.5])
    RolloutLog(folder, decode).write(3, [about_image(image_media("a", 1)), about_image(image_media("b", 2))])
    (folder / "rollouts" / "images" / "b.jpg").unlink()
    assert main(["view", str(folder), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "    [image images/7.png]how many in a?\n" in printed
    assert "  image images/7.png: 16 tokens, rollouts/images/a.jpg\n" in printed
    assert "  image images/7.png: 16 tokens, no thumbnail\n" in printed
