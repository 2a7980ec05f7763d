from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from file_limits import no_file_above

from meshrl.core.errors import OutputError
from meshrl.monitor.sinks import COLUMNS, JsonlSink, TerminalSink, duration, number, read_metrics, step_line
from tests.waiting import wait_until

UNITS = {"reward/mean": "reward", "train/grad_norm": "norm"}


def write_steps(path, steps, first_step=None, value=1.0):
    sink = JsonlSink(path, first_step, clock=lambda: 100.0)
    for step in steps:
        sink.write(step, {"reward/mean": value + step, "train/grad_norm": 0.5}, UNITS)
    sink.close()


def test_metrics_are_one_line_per_step_under_one_header(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, [0, 1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"schema": 1, "units": UNITS},
        {"schema": 1, "step": 0, "time": 100.0, "metrics": {"reward/mean": 1.0, "train/grad_norm": 0.5}},
        {"schema": 1, "step": 1, "time": 100.0, "metrics": {"reward/mean": 2.0, "train/grad_norm": 0.5}},
    ]


def test_each_step_is_on_disk_when_write_returns(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(0, {"reward/mean": 1.0}, UNITS)
    assert [line.step for line in read_metrics(tmp_path / "m.jsonl")[0]] == [0]
    sink.close()


def test_names_that_appear_later_bring_their_units(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(0, {"reward/mean": 1.0}, {"reward/mean": "reward"})
    sink.write(1, {"eval/mean_at_k": 0.5}, {"eval/mean_at_k": "fraction"})
    sink.close()
    lines, units = read_metrics(tmp_path / "m.jsonl")
    assert units == {"reward/mean": "reward", "eval/mean_at_k": "fraction"}
    assert [line.metrics for line in lines] == [{"reward/mean": 1.0}, {"eval/mean_at_k": 0.5}]


def test_a_resumed_run_continues_the_same_file_without_the_steps_that_it_repeats(tmp_path):
    """Killed in step 4 while writing, resumed from the checkpoint after step 1."""
    path = tmp_path / "m.jsonl"
    write_steps(path, [0, 1, 2, 3])
    with path.open("a") as file:
        file.write('{"schema": 1, "step": 4, "ti')
    write_steps(path, [2, 3, 4], first_step=2, value=10.0)
    lines, _ = read_metrics(path)
    assert [line.step for line in lines] == [0, 1, 2, 3, 4]
    assert [line.metrics["reward/mean"] for line in lines] == [1.0, 2.0, 12.0, 13.0, 14.0]
    assert path.read_text().count("units") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_first_step_all_complete_lines_are_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [0, 1])
    with path.open("a") as file:
        file.write('{"schema"')
    write_steps(path, [2])
    assert [line.step for line in read_metrics(path)[0]] == [0, 1, 2]


def test_non_finite_values_are_preserved(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.1}
    sink.write(0, values, {})
    sink.close()
    assert "NaN" in json.loads(path.read_text())["metrics"].values()  # a text: strict readers accept the line
    (line,), _ = read_metrics(path)
    assert math.isnan(line.metrics.pop("a")) and line.metrics == {"b": math.inf, "c": -math.inf, "d": 0.1}


def test_a_name_keeps_its_unit_over_a_resume(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [0])
    sink = JsonlSink(path)
    with pytest.raises(ValueError, match=r"units changed .*'reward/mean': \('reward', 'points'\)"):
        sink.write(1, {"reward/mean": 1.0}, {"reward/mean": "points"})
    sink.close()


def test_a_write_that_fails_in_the_middle_of_a_line_is_an_error_and_damages_no_earlier_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path, clock=lambda: 100.0)
    sink.write(0, {"reward/mean": 1.0}, {"reward/mean": "reward"})
    before = path.read_bytes()
    with no_file_above(len(before) + 30):
        with pytest.raises(
            OutputError, match=r"m\.jsonl can't be written: File too large\. Make room .*run\.resume=auto"
        ):
            sink.write(1, {"reward/mean": 2.0}, {"reward/mean": "reward"})
        sink.close(failed=True)
    assert path.read_bytes().startswith(before) and not path.read_bytes().endswith(b"\n")
    assert [line.step for line in read_metrics(path)[0]] == [0]
    write_steps(path, [1], first_step=1)  # a resumed run
    assert [line.step for line in read_metrics(path)[0]] == [0, 1]


def _replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)


@pytest.mark.parametrize("harm", [Path.unlink, _replace])
def test_a_metrics_file_that_is_removed_or_replaced_is_an_error(tmp_path: Path, harm: Callable[[Path], None]):
    """The open file would still accept lines, which no program could read."""
    path, last = tmp_path / "m.jsonl", tmp_path / "last.jsonl"
    sink, closed_next = JsonlSink(path), JsonlSink(last)
    sink.write(0, {"reward/mean": 1.0}, UNITS)
    harm(path)
    harm(last)
    with pytest.raises(OutputError, match=r"m\.jsonl was removed or replaced while the run writes it"):
        sink.write(1, {"reward/mean": 1.0}, UNITS)
    sink.close(failed=True)
    with pytest.raises(OutputError, match=r"last\.jsonl was removed or replaced"):
        closed_next.close()


def test_a_metrics_file_that_can_not_be_opened_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file can't be written: File exists"):
        JsonlSink(tmp_path / "file" / "m.jsonl")
    with pytest.raises(OutputError, match="File name too long"):
        JsonlSink(tmp_path / ("m" * 300))


VALUES = {
    "reward/mean": 0.53125,
    "rollout/length_mean_tokens": 14.25,
    "train/grad_norm": 0.4123,
    "rollout/tokens_per_s": 1234.0,
    "memory/rss_bytes": 1.25e9,
}


def test_if_the_output_is_not_a_terminal_a_step_is_one_plain_line():
    out, now = io.StringIO(), [0.0]
    sink = TerminalSink(50, out, clock=lambda: now[0])
    now[0] = 10.0
    sink.write(1, VALUES, {})
    now[0] = 30.0
    sink.write(2, {"reward/mean": float("nan")}, {})
    sink.close()
    assert out.getvalue().splitlines() == [
        "step  1/50  reward 0.531  length 14.2  grad 0.412",
        "step  2/50  reward nan  ETA 16m00s",
    ]
    assert out.getvalue().isascii()


def steps_printed(
    num_steps: int, seconds_per_step: float, last: int | None = None, finished: int = 0, counted: str = "step"
) -> list[int]:
    """The steps for which a run prints a line to a pipe. last: the step after which the run ends."""
    out, now = io.StringIO(), [0.0]
    sink = TerminalSink(num_steps, out, clock=lambda: now[0], finished_steps=finished, counted=counted)
    for step in range(finished + 1, (last or num_steps) + 1):
        now[0] += seconds_per_step
        sink.write(step, VALUES, {})
    sink.close(failed=last is not None)
    return [int(line.split()[1].partition("/")[0]) for line in out.getvalue().splitlines()]


def test_a_pipe_gets_a_line_for_each_percent_and_for_the_first_and_last_step():
    assert steps_printed(1000, 0.1) == [1, *range(10, 1001, 10)]
    assert steps_printed(250, 0.1)[:5] == [1, 3, 5, 8, 10]
    assert steps_printed(100, 0.1) == [*range(1, 101)]
    assert steps_printed(250, 0.01, counted="answer") == [1, *range(25, 251, 25)]
    resumed = steps_printed(1000, 0.1, finished=984)
    assert resumed == [985, 990, 1000]


def test_a_pipe_gets_a_line_at_least_every_ten_seconds():
    assert steps_printed(10_000, 4.0, last=9) == [1, 4, 7, 9]
    assert steps_printed(10_000, 11.0, last=4) == [1, 2, 3, 4]


def test_the_last_step_of_a_run_that_ends_early_has_a_line_too():
    assert steps_printed(1000, 0.1, last=27) == [1, 10, 20, 27]


def test_notes_are_printed_between_the_lines_of_steps_and_an_evaluation_is_one_of_them():
    """The loop sends the result of an evaluation to the sinks and as a note; a log shows it only once."""
    out = io.StringIO()
    sink = TerminalSink(1000, out, clock=lambda: 0.0)
    for step in range(1, 13):
        sink.write(step, {}, {})
        if step == 5:
            sink.write(step, {"eval/mean_at_k": 0.5}, {})
            sink.note("eval after 5 steps: mean@1 0.500")
    sink.close()
    lines = [line.partition("  ETA")[0] for line in out.getvalue().splitlines()]
    assert lines == ["step    1/1000", "eval after 5 steps: mean@1 0.500", "step   10/1000", "step   12/1000"]


def test_a_line_is_about_a_hundred_and_twenty_characters_long():
    """With several updates per step. With one, both clip fractions are exactly 0, and only the panel shows them."""
    values = VALUES | {
        "rollout/truncated_fraction": 0.125,
        "loss/policy": -0.0123,
        "loss/approx_kl": 0.0012,
        "loss/entropy": 0.312,
        "loss/clip_fraction_low": 0.0012,
        "loss/clip_fraction_high": 0.0034,
        "train/lr": 1e-6,
        "sync/latency_s": 1.5,
    }
    line = step_line(10, 100, values, 7500.0)
    assert line == (
        "step  10/100  reward 0.531  length 14.2  truncated 12.5%  entropy 0.312  clip_low 0.12%  clip_high 0.34%  "
        "grad 0.412  ETA 2h05m"
    )
    assert len(line) < 130
    one_update = step_line(10, 100, values | {"loss/clip_fraction_low": 0.0, "loss/clip_fraction_high": 0.0}, 7500.0)
    assert "clip" not in one_update and len(one_update) < 100


def test_time_left_follows_the_steps_of_this_process_and_forgets_its_start_up():
    out, now = io.StringIO(), [0.0]
    sink = TerminalSink(10, out, clock=lambda: now[0], finished_steps=6)
    now[0] = 100.0
    sink.write(6, {"eval/mean_at_k": 0.25}, {})
    now[0] = 104.0
    sink.write(7, {}, {})
    sink.write(7, {"eval/mean_at_k": 0.5}, {})
    now[0] = 108.0
    sink.write(8, {}, {})
    assert out.getvalue().splitlines() == ["step  7/10  ETA 12s", "step  8/10  ETA 8s"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_if_the_output_is_not_a_terminal_a_long_step_has_a_line_each_minute():
    out, now = io.StringIO(), [0.0]
    sink = TerminalSink(3, out, clock=lambda: now[0])
    for second in range(0, 3600, 20):  # before the first phase nothing is printed
        now[0] = float(second)
        sink.progress("")
    sink.note("ready")
    sink.entered("rollout")
    for done in range(1, 8):
        now[0] += 25.0
        sink.progress(f"{done} of 7 answers")
    sink.entered("train")
    now[0] += 70.0
    sink.entered("sync")
    sink.write(1, {"reward/mean": 0.5}, {})
    assert out.getvalue().splitlines() == [
        "ready",
        "step 1/3: rollout, 3 of 7 answers",
        "step 1/3: rollout, 6 of 7 answers",
        "step 1/3: sync",
        "step 1/3  reward 0.500",
    ]


def test_on_a_terminal_the_panel_shows_every_column_the_curve_and_notes(terminal):
    now = [0.0]
    sink = TerminalSink(4, terminal, clock=lambda: now[0])
    sink.note("held-out before: [0.25]")
    for step in (1, 2):
        now[0] += 5.0
        sink.write(step, {name: step - 0.5 for _, name, _ in COLUMNS}, {})
    before_eval = len(terminal.getvalue())
    sink.write(2, {"eval/mean_at_k": 0.75}, {})
    sink.close()
    shown = terminal.getvalue()
    assert "held-out before: [0.25]" in shown
    assert "step 2/4" in shown and "10s" in shown and "█" in shown
    for label, _, _ in COLUMNS:
        assert label in shown[before_eval:], label  # an evaluation does not blank the step's numbers


def test_the_panel_shows_the_phase_from_the_start_on_and_each_reward_term(terminal):
    sink = TerminalSink(4, terminal, clock=lambda: 0.0)

    def is_drawn(*texts: str) -> bool:
        """In the last panel, which a thread draws some times a second."""

        def last_panel() -> str:
            drawn = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", terminal.getvalue())
            return " ".join(drawn[drawn.rfind("step ") :].split())

        return wait_until(lambda: all(text in last_panel() for text in texts))

    sink.entered("rollout")
    assert is_drawn("step 0/4", "phase rollout")
    sink.entered("")  # between two phases
    sink.write(1, {"reward/term/answer": 0.25, "reward/term/[b]format[/b]": 0.125}, {})
    assert is_drawn("step 1/4", "phase rollout", "term/answer 0.250", "term/[b]format[/b] 0.125")
    sink.entered("train")
    assert is_drawn("phase train")
    sink.entered("rollout")
    sink.progress("12 of 64 answers")
    assert is_drawn("phase rollout, 12 of 64 answers")
    sink.close(True)
    assert is_drawn("phase failed")


def test_a_run_that_continues_from_an_earlier_step_draws_each_step_once(terminal):
    sink = TerminalSink(4, terminal, clock=lambda: 0.0)
    for step in (1, 2, 3, 2):
        sink.write(step, {"reward/mean": float(step)}, {})
    sink.write(2, {"eval/mean_at_k": 0.75}, {})
    sink.close()
    assert sink._curve == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(999.4, "", "999"), (999.7, "", "1k"), (999_600_000, "bytes", "1 GB"), (1234, "bytes", "1.23 kB")],
)
def test_a_number_is_rounded_before_its_factor_is_chosen(value, unit, text):
    assert number(value, unit) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
