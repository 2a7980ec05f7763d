"""What the documents say is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_follow_one_prompt_runs_from_top_to_bottom():
    text = (ROOT / "docs" / "follow_one_prompt.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_the_six_files_that_the_walk_names_exist():
    text = (ROOT / "docs" / "follow_one_prompt.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `(meshrl/[a-z_/]+\.py)`", text, re.MULTILINE)
    assert len(files) == 6
    assert all((ROOT / name).is_file() for name in files)
