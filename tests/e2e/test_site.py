"""The site of the documents."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
NOWHERE = "[a](nowhere.md) [b](data.md#nowhere) [c](../examples/nowhere.py) ![d](nowhere.svg) [e](perf)\n"


@pytest.mark.skipif(not MKDOCS.exists(), reason="there is no .venv-docs: make docs-site")
def test_the_site_has_all_pages_and_refuses_links_without_a_target(tmp_path: Path) -> None:
    pages, site = (tmp_path / "build" / name for name in ("pages", "site"))
    runpy.run_path(str(ROOT / "scripts" / "stage_site.py"))["stage"](pages)
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    with (pages / "docs" / "sft.md").open("a") as page:
        page.write("\n" + NOWHERE)
    (pages / "docs" / "not_in_nav.md").write_text("# A page\n")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([MKDOCS, "build"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    warnings = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert done.returncode == 1 and len(warnings) == 6, done.stderr[-3000:]

    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"} <= built
    assert "\\|" not in (site / "docs" / "tools.html").read_text()
