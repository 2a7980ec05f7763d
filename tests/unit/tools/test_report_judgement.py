"""report.html judges this run: the verdict, what rules of health find, notes and unreadable files stand first."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest
from tiny_run import write_run

from meshrl.cli import main
from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.sinks import JsonlSink
from meshrl.monitor.status import StatusFile
from meshrl.tools.report.folder import criterion_of, read_run, read_settings
from meshrl.tools.report.page import interval, write_report
from tests.made_runs import answer, decode

CUT = "rollout/truncated_fraction"
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def write_metrics(
    folder: Path, scores: tuple[float, float], truncated: float, reward: float = 0.0, rise: float = 0.0
) -> None:
    """A run of ten steps with two evaluations. rise: of the reward in each step."""
    sink = JsonlSink(folder / "metrics.jsonl")
    held_out = [{"eval/mean_at_k": score, "eval/standard_error": 0.05} for score in scores]
    sink.write(0, held_out[0], {})
    for step in range(1, 11):
        reward += rise
        sink.write(step, {"reward/mean": reward, "reward/term/a": reward, CUT: truncated, "loss/entropy": 2.0}, {})
    sink.write(10, held_out[1], {})
    sink.close()
    (folder / "result.json").write_text(json.dumps({"status": "done", "error": None, "wall_s": 3}))


def page_of(folder: Path) -> str:
    page = write_report(folder).read_text(encoding="utf-8")
    return page[page.index("<body>") :]


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())


def test_a_dead_run_has_no_green_mark_and_shows_first_what_is_wrong(tmp_path: Path):
    write_metrics(tmp_path, (0.225, 0.0), truncated=0.977)
    page = page_of(tmp_path)
    assert not re.search(r'class="[^"]*\b(good|done|yes)\b', page)
    text = text_of(page)
    assert '<span class="bad">held-out 0.225 -&gt; 0.000 (worse: -0.225 +- 0.139)</span>' in page
    assert f"Healthtruncation step 1: {CUT}: the newest values above 0.2 (here 0.977) Answers are cut off" in text
    assert text.index("10 steps in") < text.index("Verdict") < text.index("Health") < text.index("Rewards and")
    assert "done: held-out 0.225 → 0" in text


def test_a_finding_that_has_ended_stands_below_those_that_hold(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        sink.write(step, {"loss/approx_kl": 0.3 if step < 9 else 0.0, CUT: 0.9, "reward/mean": step / 10}, {})
    sink.close()
    (tmp_path / "result.json").write_text(json.dumps({"status": "done", "error": None, "wall_s": 3}))
    text = text_of(page_of(tmp_path))
    assert text.index("Healthtruncation step 1:") < text.index("until it endedKL runaway step 5 to 16: loss/approx_kl")
    assert "done: reward/mean 0.2 → 2.9" in text and "Try: Raise the limit" in text


def test_a_healthy_run_has_no_finding(tmp_path: Path):
    write_metrics(tmp_path, (0.225, 0.9), truncated=0.02, reward=0.5)
    page = page_of(tmp_path)
    assert '<span class="good">held-out 0.225 -&gt; 0.900 (better: +0.675' in page
    assert "<p>No rule finds anything" in page and '<span class="badge done">done: held-out 0.225 → 0.9<' in page


def test_a_reward_that_rises_while_the_held_out_score_falls_is_found(tmp_path: Path):
    write_metrics(tmp_path, (0.5, 0.1), truncated=0.0, rise=0.05)
    text = text_of(page_of(tmp_path))
    assert "Healthheld-out score falls step 10: eval/mean_at_k: the best score minus the newest one above 3" in text
    for name, scores, rise in (
        ("fell", (0.5, 0.1), -0.05),
        ("unchanged", (0.5, 0.45), 0.05),
        ("better", (0.1, 0.5), 0.1),
    ):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name, scores, truncated=0.0, rise=rise)
        assert "No rule finds anything" in text_of(page_of(tmp_path / name))


def test_terms_have_their_own_curves_and_the_held_out_score_has_an_interval(tmp_path: Path):
    write_metrics(tmp_path, (0.01, 0.99), truncated=0.02, rise=0.05)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(11, {"reward/term/a": 0.5}, {})
    sink.close()
    figures = {text_of(f.partition("</figcaption>")[0]): f for f in page_of(tmp_path).split("<figure>")[1:]}
    assert "<code>reward/term/a</code>" in figures["Terms of the training reward, before their weights"]
    held_out = figures["Learning curve"]
    assert "<code>eval/mean_at_k</code>" in held_out and "<code>reward/mean</code>" in held_out
    (band,) = re.findall(r'class="band f0" d="([^"]*)"', held_out)
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", band)]
    ticks = {text: float(y) - 3.5 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', held_out)}
    assert len(heights) == 4 and ticks["1"] == min(heights) < max(heights) == ticks["0"]  # ends of intervals


def test_what_happened_is_on_top_and_does_nothing_in_a_browser(tmp_path: Path):
    write_metrics(tmp_path, (0.225, 0.9), truncated=0.02)
    notes = ["ready after 3 s", f"rank 1 failed: {HOSTILE}", "saved a"]
    (tmp_path / "run_notes.txt").write_text("".join(f"2026-11-24 14:30:00  {note}\n" for note in notes))
    (tmp_path / "rewards.log").write_text("")
    page = page_of(tmp_path)
    top = page[: page.index('class="fold"')]
    assert "rank 1 failed" in top and "ready after" not in top and "ready after" in page
    assert "<img" not in page and "\u202e" not in page and "\x1b" not in page
    assert "rewards.log" not in page
    (tmp_path / "rewards.log").write_text("2026-11-24 14:30:00  worker 0: printed\n")
    assert '<a href="rewards.log">' in page_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", '{"status": 5'),
        ("checkpoints/best.json", '{"step": "x"}'),
        ("run_notes.txt", b"\xff\xfe"),
        ("rollouts/eval_000000.jsonl", '{"no": "rollout"}\n'),
        ("status.json", "{}"),
        ("config.yaml", b"\xff"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, content: str | bytes):
    write_metrics(tmp_path, (0.225, 0.9), truncated=0.02)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = text_of(page_of(tmp_path))
    assert "Damaged: " in text and name in text and "held-out 0.225 -> 0.900" in text and "Rewards and answers" in text


def test_steps_that_the_metrics_lack_and_the_end_of_a_run_are_stated(tmp_path: Path):
    """A run that was killed, and whose metrics were cut later."""
    StatusFile(tmp_path, 20, first_step=7).close()
    (tmp_path / "metrics.jsonl").write_text('{"schema":1,"step":1,"time":1.0,"met')
    page = page_of(tmp_path)
    assert '<span class="badge killed">killed at step 7</span>' in page and "7 steps" in text_of(page)
    assert "metrics.jsonl ends at step 0, but the run has finished step 7" in text_of(page)
    (tmp_path / "config.yaml").write_text("run:\n  resume: runs/other/checkpoints/step_000007  # my.yaml:1\n")
    assert "ends at step" not in text_of(page_of(tmp_path))  # the earlier steps are those of another run


def test_a_page_elsewhere_has_commands_and_links_that_work_there(tmp_path: Path, capsys):
    run, out = tmp_path / "my run", tmp_path / "pages" / "one.html"
    run.mkdir()
    out.parent.mkdir()
    write_metrics(run, (0.5, 0.1), truncated=0.0, rise=0.05)
    (run / "rewards.log").write_text("printed\n")
    assert main(["report", str(run), "--out", str(out)]) == 0 and str(out) in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert f"meshrl view '{run}'" in html.unescape(page) and f"meshrl report '{run}'" in html.unescape(page)
    assert '<a href="../my%20run/rewards.log">' in page and not (run / "report.html").exists()


def test_marks_without_a_value_are_neutral(tmp_path: Path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    proofs = {"sync/proven_wire": math.nan, "sync/proven_read_back": 0.5, "sync/version": 1.0}
    proofs |= {"proof/logprob_abs_diff_mean": math.nan, "proof/limit": 1e-4, "train/grad_norm": 1.0}
    sink.write(0, {"eval/mean_at_k": 0.2, "eval/standard_error": 0.1}, {})
    for step in range(1, 10):
        sink.write(step, proofs | ({"train/grad_norm": math.nan} if step > 4 else {}), {})
    sink.write(9, {"eval/mean_at_k": math.nan, "eval/standard_error": 0.1}, {})
    sink.close()
    RolloutLog(tmp_path, decode).write(9, [answer("q", "text", math.nan)], name="eval")
    page = page_of(tmp_path)
    assert not re.search(r'class="[^"]*\b(good|bad|done|yes)\b', page)
    assert re.findall(r'<li class="(\w*)"><b>(\w+)', page) == [("", "read_back")]  # the engine can't read back
    assert "train/grad_norm" in text_of(page)
    assert "held-out 0.200 -> nan (interval unknown)" in text_of(page)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if "grad_norm" not in line))
    (tmp_path / "result.json").write_text(json.dumps({"status": "done", "error": None}))
    page = page_of(tmp_path)
    assert "No rule finds anything" in text_of(page) and not re.search(r'class="[^"]*\b(good|bad|done|yes|no)\b', page)


def test_each_step_is_compared_with_its_own_limit_and_a_resumed_run_shows_the_time_of_its_parts(tmp_path: Path):
    """The run continued 900 s later, with fp32 in place of bf16."""
    clock = iter(range(0, 10**6, 300))
    for name, second, mark in (("passed", 5e-5, "yes"), ("failed", 2e-4, "no")):
        sink = JsonlSink(tmp_path / name / "metrics.jsonl", clock=lambda: float(next(clock)))
        for step, (value, limit) in enumerate([(5e-3, 1e-2), (6e-3, 1e-2), (second, 1e-4), (1e-5, 1e-4)], start=1):
            sink.write(step, {"proof/logprob_abs_diff_mean": value, "proof/limit": limit}, {})
        sink.close()
        (tmp_path / name / "result.json").write_text(json.dumps({"status": "done", "error": None, "wall_s": 320}))
        page = page_of(tmp_path / name)
        assert re.findall(r'<li class="(\w*)"><b>behaviour', page) == [mark]
        assert ("at most 0.006 nats per token; allowed: 0.01" in text_of(page)) is (mark == "yes")
        assert "4 steps in 5m20s" in text_of(page)
        (tmp_path / name / "result.json").unlink()
        assert "4 steps 15m00s from first to last line" in text_of(page_of(tmp_path / name))


def test_scores_above_1_have_intervals_on_both_sides(tmp_path: Path):
    write_metrics(tmp_path, (3.5, 4.0), truncated=0.0)
    low, high = interval(read_run(tmp_path), "eval/mean_at_k")
    assert [*low, *high] == pytest.approx([3.5 - 0.098, 4 - 0.098, 3.5 + 0.098, 4 + 0.098])


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("runs/warm/checkpoints/step_000040/model", "eval_1: evaluation of warm"),
        ("/models/other", "eval_1: evaluation of my_run"),
        (None, "eval_1: evaluation of my_run"),
    ],
)
def test_the_title_of_an_evaluation_names_the_run(tmp_path: Path, model: str | None, title: str):
    folder = tmp_path / "my_run" / "eval_1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    (folder.parent / "metrics.jsonl").touch()
    (folder / "config.yaml").write_text("run:\n  name: eval_1  # meshrl eval\n")
    (folder / "result.json").write_text(json.dumps({"status": "done", "answers": 3, "model": model}))
    assert f"<title>{title} · report</title>" in write_report(folder).read_text() and f"<h1>{title}</h1>" in page_of(
        folder
    )


def test_the_answers_of_tools_stand_between_those_of_the_model(tmp_path: Path):
    write_metrics(tmp_path, (0.225, 0.9), truncated=0.02)
    asked = answer("6*7?", "call(6*7)", 0.0)
    asked.turns += answer("6*7?", "it is 42", 0.0, messages=[{"role": "tool", "content": f"42 {HOSTILE}"}]).turns
    RolloutLog(tmp_path, decode).write(0, [asked], name="eval")
    page = page_of(tmp_path)
    assert "assistantcall(6*7)tool42 </script>" in text_of(page) and "assistantit is 42" in text_of(page)
    assert "<img" not in page


@pytest.mark.parametrize("name", ["v1.5", "right?", "my term", "42"])
def test_the_term_and_the_pass_score_of_a_config_are_read_whatever_its_names_are(tmp_path: Path, name: str):
    """Names with dots, and names that YAML quotes."""
    config = write_run(tmp_path)
    values = json.loads(config.read_text())
    form, long = {"kind": "format", "args": {"regex": "a"}}, {"max_tokens": 9, "buffer_tokens": 8}
    terms = {name: {"kind": "math_answer", "weight": 0.5}, "form": form | {"weight": 0.25}}
    terms |= {"fine": form | {"weight": -1}, "long": {"kind": "overlong", "weight": 2, "args": long}}
    data, (given, saved) = values["data"] | {"eval_path": values["data"]["path"]}, map(config.with_name, ("g", "s"))
    for term, pass_score in ((None, {name: 0.5, "form": 0.25}), (name, 1.0)):
        loop = {"num_steps": 1, "eval_term": term}
        given.write_text(json.dumps({**values, "data": data, "reward": {"terms": terms}, "loop": loop}))
        cfg = (loaded := load_run_config(given)).config
        saved.write_text(to_yaml(loaded))
        assert (cfg.eval_term, cfg.eval_pass_score) == (term or "weighted_sum", pass_score)
        assert criterion_of(read_settings(saved)) == (cfg.eval_term, cfg.eval_pass_score)
