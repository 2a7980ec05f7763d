"""`meshrl compare`: configuration, held-out scores with intervals, time, curves and answers of several runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import Chromium, chromium  # noqa: F401, a fixture
from golden import check_golden, visible_text

from meshrl.cli import main
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.tools.compare.page import compare, difference_interval
from meshrl.tools.report.page import write_report
from tests.made_runs import about_image, answer, decode, image_media, made_run, settings


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of another learning rate, with 20 held-out prompts: b becomes right where a stays wrong."""
    a = settings(model__path="tiny", train__lr=1e-5, run__seed=0, run__name="a")
    b = settings(model__path="tiny", train__lr=1e-3, run__seed=0, run__name="b", data__limit=7)
    before = [1, 0] * 10
    a += "algo:\n  # gamma: 0.9  # unused: no critic\n"
    b += "algo:\n  gamma: 0.9  # default\n"
    first = made_run(tmp_path / "a", {0: before, 2: before}, [0.5, 0.5], config=a)
    second = made_run(tmp_path / "b", {0: before, 1: [1] * 20, 2: [1] * 19 + [0]}, [0.5, 0.75], config=b)
    return first, second


def test_the_text_and_the_page_have_what_differs_scores_with_intervals_times_and_answers(runs, tmp_path, capsys):
    for run in runs:
        write_report(run)
    assert main(["compare", *map(str, runs)]) == 0
    check_golden("compare_printed.txt", capsys.readouterr().out, tmp_path)
    page = (runs[0] / "compare.html").read_text(encoding="utf-8")
    check_golden("compare.txt", visible_text(page), tmp_path)
    assert page.count("<figure") == 2 and page.count('class="band') == 2
    assert '<a href="report.html">Report</a><b>Compare</b>' in page
    assert '<p>Reports: <a href="report.html">a</a> · <a href="../b/report.html">b</a></p>' in page
    assert '<a href="compare.html">Compare</a>' in (runs[0] / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    other = tmp_path / "other.html"
    assert main(["compare", *map(str, runs[::-1]), "--out", str(other)]) == 0 and other.is_file()
    assert capsys.readouterr().out.count("worse") == 2


def test_on_a_narrow_screen_the_tables_need_no_scrolling(runs, chromium: Chromium):  # noqa: F811
    page = chromium.open(compare(runs, None)[1], width=400)
    assert page.evaluate("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    shown = page.evaluate("getComputedStyle(document.querySelector('[data-of=score]'), '::before').content")
    assert shown == '"score: "' and page.errors == []


def test_runs_of_other_seeds_have_their_spread(runs, tmp_path):
    scores = {1: [1] * 20, 2: [0] * 20}
    for seed, last in scores.items():
        config = settings(model__path="tiny", train__lr=1e-5, run__seed=seed, run__name=f"s{seed}")
        made_run(tmp_path / f"s{seed}", {2: last}, [0.5, 0.5], config=config)
    text, _ = compare([*runs, tmp_path / "s1", tmp_path / "s2"], None)
    assert (
        "a, s1, s2 differ in run.seed only: their last held-out scores are 0.500 on average, standard deviation 0.500, "
        "from 0.000 to 1.000." in text
    )
    assert "b differ" not in text and "b, " not in text.partition("HELD-OUT")[0]
    text, _ = compare([tmp_path / "s1", tmp_path / "s2"], None)
    assert "Of 3 keys, only run.seed differs" in text and "s1, s2 differ in run.seed only" in text


def test_evaluations_supervised_and_unfinished_runs_can_be_compared(runs, tmp_path):
    evaluation = made_run(tmp_path / "eval_1", {2: [1] * 20}, config="run:\n  folder: x  # meshrl eval\n")
    (evaluation / "result.json").write_text(json.dumps({"status": "done", "answers": 20, "model": "/a/b/model"}))
    text, _ = compare([evaluation, runs[1]], None)
    assert re.search(r"evaluated model +/a/b/model\n", text) and re.search(r"steps +2\n", text)
    assert re.search(r"last +b +2 +0\.950 .* -0\.050 \[-0\.170, 0\.079\] unchanged, 20 prompts", text)
    assert "first" in text
    sft = [made_run(tmp_path / f"sft_{i}", {}, [2.0, 1.0], metric="loss/nll") for i in range(2)]
    killed = made_run(tmp_path / "killed", {0: [0.5]}, [0.5], None)
    (killed / "rollouts" / "eval_000000.jsonl").unlink()
    text, path = compare([*sft, killed], None)
    assert "Of 2 keys, none differ" in text and "sft_0, sft_1, killed have the same configuration" in text
    assert "seed only" not in text and re.search(r"state +done +done +killed\n", text)
    assert re.search(r"killed +0 +0\.500", text) and "No held-out prompt was answered by all runs." in text
    assert "loss/nll" in visible_text(path.read_text(encoding="utf-8"))
    assert "HELD-OUT" not in compare(sft, None)[0]


def test_scores_of_other_terms_are_not_compared(runs, tmp_path):
    """Two runs with other values of loop.eval_term, other graders of a term, and other sampling."""
    identity = {"term": "weighted_sum", "graders": "a", "sampling": "b", "rows": "c"}
    base = made_run(tmp_path / "base", {2: [1] * 20}, [0.5, 0.5], evaluation=identity)
    for change, text in (({"graders": "x"}, "scored by other graders"), ({"term": "x"}, "scored by another term")):
        other = made_run(tmp_path / text[-7:], {2: [0] * 20}, [0.5, 0.5], evaluation=identity | change)
        shown, _ = compare([base, other], None)
        assert shown.count(f"  {text}\n") == 1 and not re.search("better|worse", shown)
    other = made_run(tmp_path / "k", {2: [0] * 20}, [0.5, 0.5], evaluation=identity | {"sampling": "x", "rows": "y"})
    assert "worse, 20 prompts, other sampling\n" in compare([base, other], None)[0]
    config = settings(model__path="tiny", loop__eval_term="form")
    old = made_run(tmp_path / "old", {0: [0] * 20, 2: [0] * 20}, [0.5, 0.5], config=config)
    assert compare([runs[0], old], None)[0].count("scored by another term") == 4


def test_other_prompts_are_not_compared(runs, tmp_path):
    """Two data sets may give the same ids to other rows."""
    other = made_run(tmp_path / "other", {2: [1] * 20}, [0.5, 0.5])
    changed = [answer(f"q{i}", "x", 1.0) for i in range(20)]
    for trajectory in changed:
        trajectory.prompt.messages = [{"role": "user", "content": "another question"}]
    RolloutLog(other, decode).write(2, changed, name="eval")
    text, _ = compare([runs[0], other], None)
    assert "no common prompts" in text and "better" not in text


def test_wrong_arguments_and_damaged_runs_are_refused(runs, tmp_path, capsys):
    assert main(["compare", str(runs[0]), f"{runs[0]}/../a"]) == 2
    assert "needs 2 to 12 different runs" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="2 to 12"):
        compare([tmp_path / str(i) for i in range(13)], None)
    with pytest.raises(MeshrlError, match=rf"ab does not exist.*did you mean {tmp_path}/[ab] or"):
        compare([runs[0], tmp_path / "ab"], None)
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    (runs[1] / "rollouts" / "eval_000001.jsonl").write_text("{}\n")
    text, path = compare(runs, None)
    for words in (r"b: damaged: .*b/metrics\.jsonl:\d+: .*'step' is missing", r"b: damaged: .*eval_000001\.jsonl:1"):
        assert re.search(words, text) and re.search(words, visible_text(path.read_text(encoding="utf-8")))
    assert "+0.450 [0.185, 0.633] better" in text


def test_hostile_names_values_and_answers_are_text(runs, tmp_path):
    evil = "<script>alert(1)</script>\u202e\x1b[2J"
    name = tmp_path / "<b>\u202e&amp"
    made_run(name, {2: [1] * 20}, [0.5, 0.5], config=settings(model__path=evil, run__seed=0))
    RolloutLog(name, decode).write(2, [answer(f"q{i}", evil, 1.0) for i in range(20)], name="eval")
    _, path = compare([runs[0], name], tmp_path / "out.html")
    page = path.read_text(encoding="utf-8")
    assert page.count("<script") == 1 and "<h1>a · &lt;b&gt;\\u202e&amp;amp</h1>" in page
    assert not {"\u202e", "\x1b"} & set(page) and "<b>\\u202e" not in page
    assert "<script>alert(1)</script>\\u202e\\x1b[2J" in visible_text(page)


def test_runs_of_the_same_name_are_shown_with_their_folders(tmp_path):
    first, second = (made_run(tmp_path / f"seed_{i}" / "grpo", {0: [1.0]}) for i in range(2))
    text, _ = compare([first, second], None)
    assert "seed_0/grpo" in text and "seed_1/grpo" in text


def test_the_interval_of_a_difference_is_that_of_matched_pairs_with_half_an_answer_in_each_cell():
    low, high = difference_interval([1] * 5 + [-1] * 1 + [0] * 34)
    center, n = 4 / 42, 42
    half = 1.96 * (((5.5 + 1.5) / n - center**2) / n) ** 0.5
    assert (low, high) == (pytest.approx(center - half), pytest.approx(center + half))
    low, high = difference_interval([0.0] * 40)
    assert -low == high > 0.04
    unit = difference_interval([1.0, 1.0, 0.0])
    assert difference_interval([100.0, 100.0, 0.0]) == pytest.approx([100 * end for end in unit])


def test_the_interval_of_a_difference_contains_the_true_one_in_95_of_100_comparisons():
    rng, prompts, samples, repeats = np.random.default_rng(0), 50, 4, 1000
    before, after = rng.beta(0.5, 0.8, (2, repeats, prompts))
    before = np.where(rng.random((repeats, prompts)) < 0.7, after, before)
    differences = (rng.binomial(samples, after) - rng.binomial(samples, before)) / samples
    inside = [low <= 0 <= high for low, high in map(difference_interval, differences)]
    assert 0.93 < np.mean(inside) < 0.99


def test_prompts_with_the_same_images_are_compared_also_if_models_process_them_differently(tmp_path):
    runs = []
    for name, tokens in (("a", 16), ("b", 64)):
        runs.append(made_run(tmp_path / name, {2: [0] * 20}, [0.5, 0.5]))
        media = [replace(image_media(name, 1, f"images/{i}.png"), num_tokens=tokens) for i in range(20)]
        answers = [about_image(each, "1", 0.0) for each in media]
        for i, trajectory in enumerate(answers):
            trajectory.group_id = trajectory.prompt.id = f"q{i}"
            trajectory.prompt.messages[0]["content"][1:] = []
        RolloutLog(runs[-1], decode).write(2, answers, name="eval")
    text, path = compare(runs, None)
    assert "no common prompts" not in text and "20 prompts" in text
    assert path.read_text(encoding="utf-8").count("<img ") > 0
