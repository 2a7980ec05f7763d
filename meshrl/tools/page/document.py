"""The parts that all pages about a run share: the document, its style sheet and scripts, links between the pages of a
run's folder, and data for the page's script."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from meshrl.core.files import output_errors, write_text
from meshrl.core.terminal import printable

PAGES = {"report.html": "Report", "view.html": "View", "compare.html": "Compare", "diagnose.html": "Diagnose"}
_NAV_BYTES = 512  # of the element with the links, so that a page can be updated in place when another one is written
_NAV = re.compile(rb'<nav class="pages"[^>]*>.*?</nav> *', re.DOTALL)


def document(
    title: str,
    parts: Sequence[str],
    *,
    style: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: str = "",
    tail: str = "",
) -> str:
    """A complete page that needs no other file. The common style sheet comes first, and the script of charts.

    title: plain text. parts: HTML. style, scripts: further CSS and JavaScript. data: `data_block`s, which the scripts
    read. tail: large blocks after the scripts, for data that is read on demand. The links are added by `write_page`.
    """
    css = "\n".join([package_text("meshrl.tools.page", "style.css"), *style])
    code = "".join(f"<script>{text}</script>" for text in [package_text("meshrl.tools.page", "charts.js"), *scripts])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n<body>{_links(set(), '')}\n"
        + "\n".join(part for part in parts if part)
        + f"\n{data}{code}{tail}</body></html>\n"
    )


def data_block(name: str, value: Any) -> str:
    """Plain JSON that a page's script reads by `JSON.parse(document.getElementById(name).textContent)`. Non-ASCII and
    control characters are escaped, and `<`, so that no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def package_text(package: str, name: str) -> str:
    """The content of a data file of a package, such as a style sheet."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def write_page(path: Path, text: str) -> Path:
    """Write a page, and update the links of all pages in its folder. Control characters in its text are escaped,
    because answers and errors may contain marks that change the order of the text on the page."""
    with output_errors(path, "Make room or make the folder writable, or copy the folder and write the page there"):
        write_text(path, printable(text))
        names = {name for name in PAGES if (path.parent / name).is_file()}
        for name in names | {path.name}:  # a page of another version, which has no links, stays as it is
            with (path.parent / name).open("r+b") as file:
                match = _NAV.search(file.read(1 << 18))  # the links are in this part of a page
                links = _links(names, name).encode()
                if match is not None and len(match[0]) == len(links):
                    file.seek(match.start())
                    file.write(links)
    return path


def _links(names: set[str], current: str) -> str:
    """The name of the page, and links to the other pages of the folder, padded to a fixed size."""
    shown = [
        f"<b>{title}</b>" if name == current else f'<a href="{name}">{title}</a>'
        for name, title in PAGES.items()
        if name in names
    ]
    return f'<nav class="pages" aria-label="pages of this run">{"".join(shown)}</nav>'.ljust(_NAV_BYTES)
