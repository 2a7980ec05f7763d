"""The visible text of a page or a command, compared with a file in tests/unit/tools/golden.

After a change that is meant: MESHRL_WRITE_GOLDEN=1 pytest ..., then read the difference of the files.
"""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path

FOLDER = Path(__file__).parent / "unit" / "tools" / "golden"
_LINES = {"p", "li", "tr", "h1", "h2", "h3", "figure", "section", "header", "footer", "pre", "details", "div", "ul"}
_HIDDEN = {"style", "script", "title", "svg"}
_VOID = {"meta", "br", "link", "img"}


class _Text(HTMLParser):
    """Lines of the text of a page, whose elements are all closed in order. The values below a chart are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, bool]] = []  # with whether it is shown
        self.lines = [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _LINES:
            self.lines.append("")
        shown = tag not in _HIDDEN and ("class", "values") not in attrs and all(shown for _, shown in self.open)
        self.open += [(tag, shown)] * (tag not in _VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag
        if tag in _LINES:
            self.lines.append("")
        elif tag in ("td", "th", "span", "b", "small"):
            self.lines[-1] += " "

    def handle_data(self, data: str) -> None:
        if all(shown for _, shown in self.open):
            self.lines[-1] += data


def visible_text(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return without_blanks("\n".join(parser.lines))


def without_blanks(text: str) -> str:
    """The lines with single spaces, without blank lines, which depend on the version of the browser."""
    return "".join(f"{line}\n" for line in (" ".join(line.split()) for line in text.splitlines()) if line)


def check_golden(name: str, text: str, *places: Path) -> None:
    """places: folders of the test, which the file has as <1>, <2> and so on."""
    for number, place in enumerate(places, start=1):
        text = text.replace(str(place), f"<{number}>")
    path = FOLDER / name
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def cases(path: Path) -> list[tuple[str, str]]:
    """(input, expected text) of a file in which each input is a line after "> ", and its text is the next line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(given.removeprefix("> "), text) for given, text in zip(lines[::2], lines[1::2], strict=True)]


def check_case(path: Path, given: str, text: str, **places: Path) -> None:
    """places: folders of the test, which the file has by their names in capitals. Written by one process: -n 0."""
    line = " ".join(text.split())
    for name, place in places.items():
        line = line.replace(str(place), name.upper())
    expected = dict(cases(path))
    if os.environ.get("MESHRL_WRITE_GOLDEN"):
        path.write_text("".join(f"> {each}\n{line if each == given else old}\n" for each, old in expected.items()))
    else:
        assert line == expected[given]
