"""docs/python.md and the example notebooks run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = """
import asyncio, json, os, sys
os.chdir("examples")
async def kernel():
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "<cell>", "exec"), vars(sys.modules["__main__"]))
        await asyncio.sleep(0)
asyncio.run(kernel())
"""


def _output_of(code: str, *arguments: str) -> str:
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(210)
@pytest.mark.parametrize("name", ["own_reward.ipynb", "look_at_a_run.ipynb"])
def test_a_notebook_runs_inside_a_running_event_loop_and_has_its_outputs(name: str):
    """The cells run one by one, as in a kernel; the function that they define grades in a worker process."""
    cells = [cell for cell in json.loads((ROOT / "examples" / name).read_text())["cells"] if "outputs" in cell]
    stored = "".join("".join(output["text"]) for cell in cells for output in cell["outputs"])
    for output in (stored, _output_of(KERNEL, name)):
        scores = re.search(r"held-out reward (\S+) before, (\S+) after|held-out reward \[(\S+),.*, (\S+)\]", output)
        before, after = filter(None, scores.groups())
        assert float(before) < 0.1 and float(after) > 0.9, output
    assert len(output.splitlines()) > 4 and _without_numbers(stored).keys() == _without_numbers(output).keys()


def _without_numbers(output: str) -> dict[str, None]:
    """The words of the output. Numbers differ between machines, as do the answers."""
    return dict.fromkeys(re.findall(r"[a-z]+(?:[/_][a-z_]+)*", re.sub(r"->.*", "", output)))


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_the_page_about_python_runs_from_top_to_bottom():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    output = _output_of("\n".join(blocks))
    first, last = map(float, re.findall(r"(\S+) -> (\S+)", output)[0])
    assert last < first
