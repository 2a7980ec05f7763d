"""diagnose.html in Chromium: it shows the numbers of diagnose.json, and hostile names do nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import Chromium, chromium

from meshrl.tools.diagnose.command import run
from tests.traces import healthy, write_trace
from tests.unit.tools.test_trace_files import CUDA, HOSTILE

__all__ = ["chromium"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    step = [*healthy(), ("collective", HOSTILE, 62, 70), ("op", HOSTILE, 79, 79.5)]
    trace = write_trace(tmp_path_factory.mktemp("page") / "run", [{0: step, 1: healthy(), 2: step}] * 3)
    run(trace, [], 3, None)
    return trace


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (400, True)])
def test_the_page_shows_every_part(folder, chromium: Chromium, width, dark):
    page = chromium.open(folder / "diagnose.html", width=width, dark=dark)
    record = json.loads((folder / "diagnose.json").read_text())
    titles = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert titles[:5] == [
        "The three largest costs",
        "Timeline of all ranks",
        "A step, by cause",
        "Collectives",
        "Phases",
    ]
    assert {"Memory by phase", "Memory over time", "Weight sync by stage"} <= set(titles)
    costs = page.evaluate("[...document.querySelectorAll('.costs b')].map(b => b.textContent)")
    assert [cost["title"] in text for cost, text in zip(record["costs"], costs)] == [True] * 3
    assert page.evaluate("document.querySelectorAll('.lanes rect.back').length") == 3
    bars = page.evaluate("[...document.querySelectorAll('.fall > div')].map(row => row.textContent)")
    shown = [cost["title"] for cost in record["costs"] if cost["share"] >= 0.002]
    assert [text.endswith(title) for text, title in zip(bars, shown, strict=True)] == [True] * len(shown)
    charts = "[...document.querySelectorAll('svg[role=img]')].every(s => s.getAttribute('aria-label') && "
    assert page.evaluate(charts + "s.closest('figure').querySelector('details.values table'))")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.errors == [] and page.dialogs == []


def test_the_table_below_the_timeline_has_what_is_too_short_to_be_drawn(tmp_path, chromium: Chromium, monkeypatch):
    monkeypatch.setattr("meshrl.tools.diagnose.page.MAX_DRAWN", 3)
    run(write_trace(tmp_path, [{0: healthy()}] * 20), [], 3, None)
    page = chromium.open(tmp_path / "diagnose.html")
    assert page.evaluate("document.querySelectorAll('.lanes')[0].querySelectorAll('rect:not(.back)').length") == 3
    assert "shorter intervals are not drawn" in page.evaluate("document.getElementById('diagnose').textContent")
    rows = page.evaluate(
        "[...document.querySelectorAll('details.values tr')].slice(0, 2).map(r => [...r.cells].map(c => c.textContent))"
    )
    assert dict(zip(*rows))["computation of the training"] == "0.72 s"
    assert page.evaluate("document.querySelectorAll('.zoom button').length") == 1 + 20, "all steps, and each step"


def test_a_step_of_the_timeline_can_be_chosen(folder, chromium: Chromium):
    page = chromium.open(folder / "diagnose.html")
    count = "document.querySelectorAll('.lanes')[0].querySelectorAll('rect:not(.back)').length"
    of_all = page.evaluate(count)
    page.evaluate("document.querySelectorAll('.zoom button')[2].click()")
    assert 0 < page.evaluate(count) < of_all / 2
    pressed = "[...document.querySelectorAll('.zoom button')].map(b => b.getAttribute('aria-pressed'))"
    assert page.evaluate(pressed) == ["false", "false", "true", "false"]


def test_the_timeline_is_magnified_and_moved_by_buttons(folder, chromium: Chromium):
    page = chromium.open(folder / "diagnose.html")
    shown = "[...document.querySelectorAll('.lanes text[text-anchor=middle]')].map(t => t.textContent)"

    def press(name: str, times: int = 1) -> list[float]:
        page.evaluate(f"for (let i = 0; i < {times}; i++) document.querySelector('[aria-label=\"{name}\"]').click()")
        return [float(text) for text in page.evaluate(shown)]

    every = press("zoom out")
    assert every[0] == 0 and every[-1] == 0.3
    inside = press("zoom in", 6)  # ms from here on
    assert 147 < inside[0] < inside[-1] < 153 and len(set(inside)) == len(inside)
    assert press("later")[0] > inside[0] > press("earlier", 2)[0]
    assert press("zoom out", 6) == every
    assert press("earlier") == every
    assert page.evaluate("document.querySelectorAll('.zoom [aria-pressed=true]').length") == 0
    assert page.errors == []


def test_names_of_a_trace_are_shown_as_text(folder, chromium: Chromium):
    page = chromium.open(folder / "diagnose.html")
    text = page.evaluate("document.getElementById('diagnose').textContent")
    assert "onerror=alert(1)>\\u202egnp\\u001b[2J" in text
    assert "\u202e" not in text and page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.dialogs == []


def test_the_page_of_another_programs_trace(tmp_path, chromium: Chromium):
    run(CUDA, [], 3, tmp_path)
    page = chromium.open(tmp_path / "diagnose.html")
    assert "_allgather_base" in page.evaluate("document.getElementById('diagnose').textContent")
    assert page.errors == []
