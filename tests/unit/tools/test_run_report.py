"""report.html: complete, without external files, and equal to the run's files."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path

import pytest
from golden import check_golden, visible_text

from meshrl.core.errors import MeshrlError
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink
from meshrl.tools.page.charts import Line, line_chart, number, stacked_chart
from meshrl.tools.report.folder import LoggedAnswer, LoggedPrompt, read_run
from meshrl.tools.report.page import write_report
from tests.made_runs import about_image, answer, decode, image_media

CONFIG = """\
# resolved from gsm8k.yaml
model:
  path: tiny                                    # gsm8k.yaml:2
train:
  optimizer:
    lr: 1e-05                                   # command line
    # eps: 1e-08                                # unused: no effect
loop:
  num_steps: 20                                 # gsm8k.yaml:9
  save_every_steps: 0                           # default
"""
UNITS = {"reward/mean": "", "eval/mean_at_k": "score", "memory/rss_bytes": "bytes", "train/grad_norm": ""}
UNITS |= {"time/rollout_s": "s", "time/train_s": "s", "sync/version": "version", "sync/proven_wire": "fraction"}
UNITS |= {"proof/logprob_abs_diff_mean": "nats", "proof/limit": "nats"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty steps of an invented run with two evaluations, an infinity, and an answer that contains HTML."""
    run = tmp_path / "made_up"
    clock = iter(range(1000))
    sink = JsonlSink(run / "metrics.jsonl", clock=lambda: 2.0 * next(clock))
    sink.write(0, {"eval/mean_at_k": 1 / 3}, UNITS)
    for step in range(1, 21):
        values = {
            "reward/mean": (step - 1) / 20,
            "train/grad_norm": math.inf if step == 8 else 1.0,
            "memory/rss_bytes": 1e9 + (step - 1) * 1e6,
            "time/rollout_s": 1.25,
            "time/train_s": 0.5,
            "sync/version": float(step),
            "sync/proven_wire": 1.0,
            "proof/logprob_abs_diff_mean": 1e-6,
            "proof/limit": 1e-4,
        }
        sink.write(step, values, UNITS)
    sink.write(20, {"eval/mean_at_k": 2 / 3, "eval/by/billing/mean_at_k": 0.5}, UNITS)
    sink.close()
    log = RolloutLog(run, decode)
    log.write(0, [answer("6*7?", "41", 0), answer("forty two?", "42", 1), answer("hard?", "no", 0)], name="eval")
    evil = answer("forty two?", "</pre><script>alert(1)</script>", 0)
    log.write(20, [answer("6*7?", "42 indeed", 1), evil, answer("hard?", "still no", 0)], name="eval")
    (run / "config.yaml").write_text(CONFIG)
    (run / "run_notes.txt").write_text("2026-11-24 14:30:00  rank 3 <lost>; replacing it\n")
    return run


def test_the_page_is_complete_and_loads_nothing(folder: Path):
    page = write_report(folder).read_text(encoding="utf-8")
    assert not re.search(r"<[^>]* (src|href|srcset|onclick|onload)=", page)  # a link only to an existing file
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("<script") == 1
    assert "</pre><script>alert(1)</script>" in visible_text(page)
    names = ["config.yaml", "metrics.jsonl", "report.html", "rollouts", "run_notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_the_page_shows_scores_samples_proofs_settings_and_times(folder: Path):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.json").write_text(json.dumps({"step": 20, "score": 2 / 3, "model": "m"}))
    check_golden("report.txt", visible_text(write_report(folder).read_text(encoding="utf-8")), folder)


def test_constant_curves_and_those_with_the_values_of_another_one_are_a_line(tmp_path: Path):
    """A reader can't distinguish an omitted curve from one that was never logged."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": step / 4, "reward/term/a": step / 4, "reward/failed": 0.0, "eval/x": 1.0}, {})
    sink.close()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    drawn = [name for figure in page.split("<figure>")[1:] for name in re.findall(r"</i><code>([^<]*)</code>", figure)]
    assert drawn == ["reward/mean"]
    assert "Constant, or equal to another curve: reward/term/a = reward/mean, reward/failed 0." in visible_text(page)


def test_the_memory_of_each_phase_is_next_to_its_plan(tmp_path: Path):
    names = [
        f"memory/{kind}_bytes/{phase}" for kind, phase in (("phase", "train"), ("planned", "train"), ("phase", "end"))
    ]
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, peak in ((1, 3.1e9), (2, 3e9)):
        sink.write(step, dict(zip(names, (peak, 4e9, 1e9), strict=True)), dict.fromkeys(names, "bytes"))
    sink.close()
    text = visible_text(write_report(tmp_path).read_text())
    assert "phase measured peak planned peak of the plan train 3.1 GB 4 GB 78% end 1 GB" in " ".join(text.split())


def test_a_run_without_held_out_rows_states_so_and_shows_answers_of_its_last_step(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {"reward/mean": 0.5}, {})
    sink.close()
    log = RolloutLog(tmp_path, decode)
    log.write(3, [answer("6*7?", "42 at last", 1), answer("hard?", "still no", 0)])
    text = visible_text(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Verdict : none, because the run has no held-out rows." in text
    assert "Prompts of step 3" in text and "42 at last" in text and "still no" in text
    (tmp_path / "config.yaml").write_text("data:\n  eval_path: rows.jsonl  # my.yaml:3\n")
    assert "none yet, because no evaluation has ended" in visible_text(write_report(tmp_path).read_text("utf-8"))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(4, {"eval/loss": 0.25}, {})
    sink.close()
    assert "Held-out loss : 0.2500 nats a token after 4 steps" in visible_text(
        write_report(tmp_path).read_text("utf-8")
    )


def test_the_folder_is_read_as_it_was_written(folder: Path):
    run = read_run(folder)
    assert run.series["eval/mean_at_k"].steps == [0, 20]
    assert run.series["reward/mean"].steps == list(range(1, 21))
    assert run.wall_s == 2.0 * 21
    assert [(s.key, s.value, s.origin) for s in run.settings] == [
        ("model.path", "tiny", "gsm8k.yaml:2"),
        ("train.optimizer.lr", "1e-05", "command line"),
        ("train.optimizer.eps", "1e-08", "unused: no effect"),
        ("loop.num_steps", "20", "gsm8k.yaml:9"),
        ("loop.save_every_steps", "0", "default"),
    ]


def test_the_keys_of_the_run_decide_which_answers_of_an_evaluation_are_right(folder: Path):
    def right(*lines: str, weight: str = "") -> list[bool]:
        terms = [
            f"    {name}:\n      kind: m:f  # default\n      weight: {weight}  # default"
            for name in ("correct", "other")
            if weight
        ]
        text = ["reward:", "  terms:", *terms, "loop:", *(f"  {line}  # default" for line in lines)]
        (folder / "config.yaml").write_text("\n".join(text) + "\n")
        evaluation = read_run(folder).first_eval
        assert evaluation is not None
        return [prompt.is_right for prompt in evaluation[1].values()]

    attempts = [answer("6*7?", "41", 0.5), answer("forty two?", "42", 1)]
    attempts[0].rewards["other"], attempts[1].rewards["other"] = 2.0, 0.0
    attempts[0].reward = 1.5
    log = RolloutLog(folder, decode)
    log.write(0, attempts, name="eval")
    assert right("eval_term: correct") == [False, True] and right("eval_term: correct", "eval_pass_score: 0.5") == [
        True,
        True,
    ]
    assert right() == right("eval_term: null", "eval_pass_score: null") == [True, True]
    assert right("eval_term: other", "eval_pass_score: 1.0") == [True, False]
    assert right("eval_term: weighted_sum", "eval_pass_score: 1.5") == [True, False]
    assert right("eval_term: weighted_sum", "eval_pass_score: many") == [True, True]

    attempts[1].rewards.update(correct=None, other=1.0)  # it passes by the other term alone
    attempts[1].reward = 0.5
    log.write(0, attempts, name="eval")
    assert right("eval_term: null", weight="0.5") == [True, True] and right(weight="2") == [False, False]


def test_the_page_of_a_single_evaluation_shows_wrong_and_right_answers(folder: Path):
    (folder / "rollouts" / "eval_000020.jsonl").unlink()
    (folder / "result.json").write_text(json.dumps({"status": "done", "error": None, "wall_s": 3.0, "answers": 3}))
    (folder / "config.yaml").write_text("run:\n  name: made_up  # meshrl eval\n")
    text = visible_text(write_report(folder).read_text(encoding="utf-8"))
    for words in ("Held-out prompts, after 0 steps. wrong 2 right 1", "3 answers in 3s", "41", "hard?", "score 1"):
        assert words in text
    assert text.index("Wrong") < text.index("\n41\n") < text.index("Right") < text.index("forty two?")


@pytest.mark.parametrize(("scores", "is_right"), [([1, 0], True), ([1, 0, 0.9], False), ([None, None, 2], False)])
def test_a_prompt_with_several_answers_is_right_when_half_of_them_are(scores: list[float | None], is_right: bool):
    answers = [LoggedAnswer([], score, score is not None and score >= 1, "done") for score in scores]
    assert LoggedPrompt([], "", answers).is_right == is_right


def test_a_pause_before_a_resumed_step_is_not_time_of_that_step(folder: Path):
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: 90_000.0)
    sink.write(21, {"time/rollout_s": 1.25}, {})
    sink.close()
    assert read_run(folder).phases["other"][21] == 0.0


def test_the_page_of_an_interrupted_evaluation_states_nothing_about_training(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    config = "model:\n  path: small  # my.yaml:1\nalgo:\n  advantage: grpo  # default\nrun:\n  name: e  # meshrl eval\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "result.json").write_text(json.dumps({"status": "interrupted", "answers": 2, "wall_s": 3}))
    text = visible_text(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "none yet, because no evaluation has ended" in text and "model small" in text
    assert "· advantage" not in text and "step" not in text.partition("What to look at")[0]


def test_a_run_without_a_step_has_a_page_and_a_folder_without_a_run_has_none(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "error": "RankFailure: <gone>", "wall_s": 3}))
    text = visible_text(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "RankFailure: <gone>" in text and "failed at step 0" in text
    with pytest.raises(MeshrlError, match=r"elsewhere does not exist; give the folder of a run"):
        write_report(tmp_path / "elsewhere")


def points(svg: str, css: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path class="{css}" d="([^"]*)"', svg)
    assert path is not None, css
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path[1])]


def test_the_points_of_curves_are_at_their_values():
    """A value twice as high is twice as far from the axis; non-finite values are gaps."""
    svg = line_chart([Line("a", [1, 2, 3, 4], [0.0, 1.0, math.nan, 2.0])], "")
    (x0, y0), (x1, y1), (x3, y3) = points(svg, "l0")
    assert y0 - y3 == pytest.approx(2 * (y0 - y1), abs=0.2) and y3 < y1 < y0
    assert x3 - x0 == pytest.approx(3 * (x1 - x0), abs=0.3)
    assert svg.count("M", svg.index("l0")) >= 2
    assert line_chart([Line("a", [1], [math.nan])], "") == ""


def test_long_curves_are_drawn_in_a_bounded_number_of_points():
    svg = line_chart([Line("a", range(10_000), [float(i) for i in range(10_000)])], "")
    assert len(points(svg, "l0")) == 240 and len(svg) < 20_000
    bars = stacked_chart({"rollout": dict.fromkeys(range(10_000), 1.0)}, [0])
    assert bars.count("<rect") == 60


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.3e9, "bytes", "1.3 GB"),
        (5.1e9, "", "5.1G"),
        (0.04, "s", "40 ms"),
        (187, "s", "3m07s"),
        (2.34e-7, "nats", "2.34e-7"),
        (0.5, "fraction", "0.5"),
        (math.nan, "s", "nan"),
    ],
)
def test_numbers_are_short(value: float, unit: str, text: str):
    assert number(value, unit) == text


def test_images_are_shown_with_their_question(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {"reward/mean": 0.5}, {})
    sink.close()
    kept, gone = image_media("a", 1), image_media("b", 2, "<img onerror=alert(1)>")
    RolloutLog(tmp_path, decode).write(3, [about_image(kept), about_image(gone, "4", 0.0)])
    (tmp_path / "rollouts" / "images" / "b.jpg").unlink()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    text = visible_text(page)
    assert re.findall(r"<img [^>]*>", page) == [
        f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(kept.thumbnail).decode()}">'
    ]
    assert "images/7.png · 16 tokens" in text and "[image images/7.png]how many in a?" in text
    assert "no thumbnail <img onerror=alert(1)> · 16 tokens" in text
