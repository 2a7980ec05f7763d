"""The script of attention_*.html in a browser: maps, hover, keys, the coloured text, the table; hostile tokens."""

import base64
import zlib

import numpy as np
import pytest
from chromium import chromium

from meshrl.tools.page.document import data_block, document, package_text, write_page

__all__ = ["chromium"]
pytestmark = pytest.mark.slow  # test_view_page.py has a page in a browser in each run of the suite
TOKENS = ["<b>Is</b>", "\n" + "w" * 900, "</script><script>alert(1)</script>", " am", " I"]
HERE = "meshrl.tools.viewer"


@pytest.fixture
def made(tmp_path):
    """A page with two heads over five tokens; the first layer has no map. Head 1 attends only to the first token."""
    weights = np.zeros((3, 5, 5))
    for query in range(5):
        weights[0, query, : query + 1] = 1 / (query + 1)
        weights[1, query, 0] = 1
    weights[2] = weights[:2].mean(0)
    packed = zlib.compress(np.rint(np.sqrt(weights) * 255).astype(np.uint8).tobytes())
    facts = {"tokens": TOKENS, "sampled": [0, 0, 0, 1, 1], "block": 1, "side": 5, "heads": 2, "layers": [None, []]}
    maps = f'<script type="text/plain" id="map1">{base64.b64encode(packed).decode()}</script>'
    parts = [f'<p class="note">{"/a/long/path" * 20}</p>', package_text(HERE, "attention.html")]
    style, script = package_text(HERE, "attention.css"), package_text(HERE, "attention.js")
    data = data_block("attention", facts) + maps
    return write_page(tmp_path / "page.html", document("t", parts, style=[style], scripts=[script], data=data))


def opened(chromium, path, **size):
    page = chromium.open(path, **size)
    page.wait_for("document.querySelectorAll('#top tbody tr').length > 0")
    return page


@pytest.fixture
def page(made, chromium):
    return opened(chromium, made)


def table(page):
    return page.evaluate(
        "[...document.querySelectorAll('#top tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )


def test_the_page_shows_the_weights_of_the_chosen_head_layer_and_token(page):
    assert page.evaluate("document.getElementById('layer').value") == "1"
    assert page.evaluate("document.getElementById('layer').options[0].disabled") is True
    assert table(page)[0] == ["<b>Is</b>", "0", "0.60"]  # of the last sampled token, the mean of both heads
    page.evaluate("document.querySelectorAll('#heads button')[2].click()")
    assert table(page)[0] == ["<b>Is</b>", "0", "1.00"]
    page.evaluate("document.querySelectorAll('#heads button')[1].click(), document.getElementById('token3').click()")
    assert [row[2] for row in table(page)] == ["0.25"] * 4
    colours = page.evaluate("[...document.querySelectorAll('#text span')].map(t => t.style.backgroundColor)")
    assert len(set(colours[:4])) == 1 and colours[0] and not colours[4]
    assert page.errors == [] and page.dialogs == []


def test_the_map_and_the_text_work_with_the_keyboard(page):
    page.evaluate("document.getElementById('map').focus()")
    page.press("ArrowUp")
    shown = page.evaluate("document.getElementById('at').textContent")
    assert shown == "“ am” (3) attends to “<b>Is</b>” (0) with weight 0.63"
    page.press("Enter")
    assert page.evaluate("document.querySelector('[aria-selected=true]').id") == "token3"
    page.evaluate("document.getElementById('text').focus()")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('[aria-selected=true]').id") == "token2"
    assert len(table(page)) == 3


def test_pointing_at_a_cell_names_both_tokens_and_texts_are_no_markup(page):
    page.evaluate(
        "(() => { const c = document.getElementById('map'), b = c.getBoundingClientRect(), s = b.width / c.width;"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + 60 * s, clientY: b.top + 500 * s})); })()"
    )
    assert page.evaluate("document.getElementById('at').textContent").startswith("“ I” (4) attends to “<b>Is</b>” (0)")
    assert page.evaluate("document.querySelectorAll('#text b').length") == 0 and page.dialogs == []


def test_the_page_is_usable_on_a_phone_with_long_tokens_and_paths(made, chromium):
    page = opened(chromium, made, width=400, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert table(page)[1][0] == "↵" + "w" * 59 + "…"
    page.evaluate("document.getElementById('map').focus()")
    page.press("ArrowRight")
    shown = page.evaluate("document.getElementById('at').textContent")
    assert shown.startswith("“ I” (4) attends to “↵www") and shown.endswith("…” (1) with weight 0.10")
    assert page.evaluate("document.documentElement.scrollWidth") == 400 and page.errors == [] == page.dialogs
