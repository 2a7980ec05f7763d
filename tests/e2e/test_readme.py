"""The commands for a run of one's own, in README and then docs/quickstart.md, run as written after a quickstart."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import train, write_run

ROOT = Path(__file__).parents[2]
SFT = ("sft.num_steps=20", "train.scheduler.warmup_steps=2")  # of the quickstart's 300


def block_of(page: str, kind: str) -> str:
    """The first block of a kind below "Your own run"."""
    section = (ROOT / page).read_text().split("\n## Your own run\n")[1]
    block = re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1]


def commands(page: str) -> list[list[str]]:
    lines = block_of(page, "bash").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.mark.slow
@pytest.mark.timeout(1200)
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

    first, *rest = commands("README.md")
    assert first[0] == "source" and len(rest) < 10
    rest += commands("docs/quickstart.md")
    printed = {}
    for words in rest:
        assert words[0] == "meshrl"
        printed[" ".join(words[1:])] = run(words, tmp_path)
    assert {words[1] for words in rest} >= {
        "init",
        "train",
        "chat",
        "eval",
        "view",
        "report",
        "replay",
        "export",
        "diagnose",
    }
    assert "# first prompt: 15 tokens" in printed["train my/config.yaml --explain"]
    assert "first" in printed["runs"] and "second" in printed["runs"]
    for page in ("report.html", "view.html", "eval_1/result.json"):
        assert (tmp_path / "runs" / "first" / page).is_file()


def test_the_config_and_the_reward_of_readme_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_run(tmp_path)
    (tmp_path / "my_reward.py").write_text(block_of("README.md", "python"))
    (tmp_path / "my.yaml").write_text(f"base: {base.name}\n" + block_of("README.md", "yaml"))
    tiny = [  # the rest is as written
        *("model.path=model", "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "rollout.sampling.max_new_tokens=4"),
        *("loop.num_steps=1", "loop.prompts_per_step=2", "loop.samples_per_prompt=2", "cluster.num_train_ranks=1"),
    ]
    monkeypatch.chdir(tmp_path)
    folder = train(tmp_path / "my.yaml", "my", "cluster.executor=inline", *tiny)
    assert (folder / "checkpoints" / "step_000001" / "model").is_dir() and (folder / "report.html").is_file()


def test_every_command_of_meshrl_is_in_readme_or_in_the_docs() -> None:
    """A command that nothing names is not found by its users."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "commands.md"]  # the list of all
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *pages])
    help_text = subprocess.run([sys.executable, "-m", "meshrl", "--help"], capture_output=True, text=True).stdout
    names = re.findall(r"^    ([a-z]+) ", help_text, re.MULTILINE)
    assert len(names) >= 15
    assert [name for name in names if f"meshrl {name}" not in texts] == []
