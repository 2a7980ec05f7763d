"""diagnose.html in Chromium: it shows the numbers of diagnose.json, and hostile names do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Chromium, chromium
from golden import check_golden, without_blanks

from meshrl.tools.diagnose.command import run
from tests.traces import healthy, write_trace
from tests.unit.tools.test_trace_files import HOSTILE

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
    check_golden("diagnose.txt", without_blanks(page.evaluate("document.body.innerText")))
    assert page.evaluate("[...document.querySelectorAll('svg[role=img]')].every(s => s.getAttribute('aria-label'))")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.errors == [] and page.dialogs == []


def test_names_of_a_trace_are_shown_as_text(folder, chromium: Chromium):
    page = chromium.open(folder / "diagnose.html")
    text = page.evaluate("document.getElementById('diagnose').textContent")
    assert "onerror=alert(1)>\\u202egnp\\u001b[2J" in text
    assert "\u202e" not in text and page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.dialogs == []
