"""Copy README.md, the pages of docs/ and the files that they link to into build/pages; `make docs-site` builds from it.

A copy has the path of its file, so links are the same on the site and in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()[^)\s#:]+")  # without an anchor; links to other hosts have a colon
CODE = re.compile(r"`[^`\n]+`")


def stage(pages: Path) -> None:
    shutil.rmtree(pages, ignore_errors=True)
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in files:  # grows
        place = pages / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, place)
            continue
        text = path.read_text(encoding="utf-8")
        place.write_text("\n".join(map(_without_escapes, text.split("\n"))), encoding="utf-8")
        targets = (Path(os.path.normpath(path.parent / link)) for link in LINK.findall(text))
        files += dict.fromkeys(each for each in targets if each.is_file() and each not in files)


def _without_escapes(line: str) -> str:
    """A row of a table with `a|b` in code, where GitHub's Markdown needs a backslash and Python's shows it."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line


if __name__ == "__main__":
    stage(ROOT / "build" / "pages")
