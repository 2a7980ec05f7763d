"""docs/python.md and the example notebook run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = """
import asyncio, json, sys
async def kernel():
    for cell in json.load(open("examples/notebook_grpo.ipynb"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "<cell>", "exec"), vars(sys.modules["__main__"]))
        await asyncio.sleep(0)
asyncio.run(kernel())
"""


def _output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_the_notebook_trains_inside_a_running_event_loop():
    """The cells run one by one, as in a kernel; the function that they define grades in a worker process."""
    output = _output_of(KERNEL)
    before, after = re.findall(r"held-out reward (\S+) before, (\S+) after", output)[0]
    assert float(before) < 0.1 and float(after) > 0.9, output
    assert 2 <= len(re.findall(r"^step +\d+  reward", output, re.MULTILINE)) < 12  # on_step has ended it


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_the_page_about_python_runs_from_top_to_bottom():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    output = _output_of("\n".join(blocks))
    first, last = map(float, re.findall(r"(\S+) -> (\S+)", output)[0])
    assert last < first
