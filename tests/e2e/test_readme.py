"""README's commands for a run of one's own run as written, in their order, after a quickstart."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SFT = ("sft.num_steps=20", "train.scheduler.warmup_steps=2")  # of the quickstart's 300


def commands(heading: str) -> list[list[str]]:
    """The words of each meshrl command in the first block of commands below a heading of README."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [words for words in (shlex.split(line, comments=True) for line in block[1].splitlines()) if words]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_for_your_own_run_work_after_the_quickstart(tmp_path: Path) -> None:
    seed = tmp_path / "runs" / "quickstart" / "seed_0"
    environment = os.environ | {"MESHRL_DEVICE": "cpu"}

    def run(words: list[str], folder: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, f"{words}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    subprocess.run([sys.executable, "examples/quickstart/task.py", "--out", seed / "start"], cwd=ROOT, check=True)
    settings = [f"run.folder={seed}", "run.name=sft", f"model.path={seed}/start", f"sft.path={seed}/start/warmup.jsonl"]
    run(["meshrl", "sft", "examples/quickstart/sft.yaml", *settings, *SFT], ROOT)

    first, *rest = commands("Your own run")
    assert first[0] == "source"
    printed = {}
    for words in rest:
        assert words[0] == "meshrl"
        printed[" ".join(words[1:])] = run(words, tmp_path)
    assert {words[1] for words in rest} >= {"init", "train", "chat", "eval", "view", "report", "compare", "diagnose"}
    assert "# first prompt: 15 tokens" in printed["train my/config.yaml --explain"]
    assert "first" in printed["runs"] and "second" in printed["runs"]
    for page in ("report.html", "view.html", "eval_1/result.json"):
        assert (tmp_path / "runs" / "first" / page).is_file()


def test_every_command_of_meshrl_is_in_readme_or_in_the_docs() -> None:
    """A command that nothing names is not found by its users."""
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    help_text = subprocess.run([sys.executable, "-m", "meshrl", "--help"], capture_output=True, text=True).stdout
    names = re.findall(r"^    ([a-z]+) ", help_text, re.MULTILINE)
    assert len(names) >= 15
    assert [name for name in names if f"meshrl {name}" not in texts] == []
