"""The walk-through of docs/see.md: three planted faults are found by the pages alone, with the page's own commands."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import Chromium, chromium  # noqa: F401, a fixture

ROOT = Path(__file__).parents[2]
SEED = Path("runs/quickstart/seed_0")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def commands() -> list[str]:
    """Those of the section, in order."""
    text = (ROOT / "docs" / "see.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text[text.index("## Three faults") :], re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's warm-up, in which the commands have run."""
    place = tmp_path_factory.mktemp("walk_through")
    (place / "examples").symlink_to(ROOT / "examples")
    start = SEED / "start"
    quickstart = ROOT / "examples" / "quickstart"
    warm_up = ["meshrl sft examples/quickstart/sft.yaml run.name=sft", f"run.folder={SEED}", f"model.path={start}"]
    run(place, sys.executable, str(quickstart / "task.py"), "--out", str(start), "--seed", "0")
    for command in [f"{' '.join(warm_up)} sft.path={start}/warmup.jsonl", *commands()]:
        run(place, sys.executable, "-m", *shlex.split(command))
    return place


def run(place: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{place}", "MESHRL_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def text_of(page: Path) -> str:
    body = re.sub(r"(?s)<(script|style).*?</\1>", "", page.read_text(encoding="utf-8"))
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", body)).split())


def test_a_reward_with_a_loophole_is_found_by_the_report(place: Path) -> None:
    text = text_of(place / SEED / "hacked" / "report.html")
    above = text[: text.index("Answers Held-out prompts")]
    assert re.search(
        r"Verdict : held-out answer 0\.\d+ -> 0\.000 \(worse: -0\.\d+ \+- 0\.\d+\); "
        r"best: 0\.\d+ at step 0 best model: \S+",
        above,
    )
    assert re.search(r"held-out score falls step \d+: eval/mean_at_k : the best score minus the newest one", above)
    assert re.search(r"truncation step \d+: rollout/truncated_fraction : the newest values above 0.2", above)


def test_a_collapsed_entropy_is_found_by_the_report(place: Path) -> None:
    text = text_of(place / SEED / "collapsed" / "report.html")
    above = text[: text.index("Answers Held-out prompts")]
    assert "(unchanged" in above and "loss/entropy : the newest values below 0.1 times" in above
    assert re.search(r"groups without signal step \d+:", above)


def test_the_best_answers_of_a_reward_with_a_loophole_show_it(place: Path, chromium: Chromium) -> None:  # noqa: F811
    page = chromium.open(place / SEED / "hacked" / "view.html")
    page.wait_for("document.querySelector('#rows > *')")
    page.evaluate("""{
        const sort = document.getElementById("sort");
        sort.value = "-reward";
        sort.dispatchEvent(new Event("input", { bubbles: true }));
        sort.dispatchEvent(new Event("change", { bubbles: true }));
    }""")
    assert page.wait_for("/000000/.test(document.querySelector('#rows').firstElementChild.textContent)")
    assert not page.errors


def test_a_slow_rank_is_the_first_cost_of_the_diagnosis(place: Path, chromium: Chromium) -> None:  # noqa: F811
    (page,) = (place / SEED).glob("*/diagnose.html")
    text = chromium.open(page).wait_for("document.querySelector('.costs > li')?.textContent")
    assert re.match(r"\d+ % of a step \(\S+ s\): a slow rank: the others wait for rank 1", text), text
