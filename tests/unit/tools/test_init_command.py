"""`meshrl init`: what it writes is complete, fits the model, and is not written twice."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from tiny_models import tiny_qwen2
from tiny_tokenizers import tiny_tokenizer

from meshrl.cli import main
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.run.inputs import Objects, load_run
from meshrl.run.task import load_task
from meshrl.tools.init import NUM_HELDOUT, NUM_TRAIN, TASKS, word_problems


def model(folder: Path, positions: int, template: str | None = "own") -> str:
    tokenizer = tiny_tokenizer()
    if template != "own":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tiny_qwen2(vocab_size=len(tokenizer), max_position_embeddings=positions).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("positions", "question"), [(2048, "How many"), (80, "2*")])
def test_it_writes_a_run_that_loads_with_problems_that_fit(tmp_path, capsys, monkeypatch, positions, question):
    path, folder = model(tmp_path / "model", positions), tmp_path / "new" / "my"
    assert main(["init", str(folder), "--model", path]) == 0
    assert f"meshrl train {folder}/config.yaml --explain" in capsys.readouterr().out
    monkeypatch.chdir("/")  # paths and modules are found next to the config, not in the working folder
    cfg = load_run(folder / "config.yaml", []).config
    task = load_task(cfg, Objects(), training=True)
    assert len(task.eval_prompts) == NUM_HELDOUT and task.num_eval_left_out == 0
    assert question in task.eval_prompts[0].messages[-1]["content"]
    rows = [json.loads(line) for name in ("train", "heldout") for line in (folder / f"{name}.jsonl").open()]
    assert len(rows) == NUM_TRAIN + NUM_HELDOUT == len({row["question"] for row in rows})
    assert (folder / "chat_template.jinja").read_text() == tiny_tokenizer().chat_template
    longest = max(len(prompt.ids) for prompt in task.eval_prompts) + cfg.rollout.sampling.max_new_tokens
    assert longest <= positions


def test_its_reward_accepts_the_right_number_at_the_end(tmp_path):
    folder = tmp_path / "my"
    main(["init", str(folder), "--model", model(tmp_path / "model", 2048)])
    names: dict = {}
    exec((folder / "my_reward.py").read_text(), names)
    score = names["score"]
    right = ["12", "5 + 7 = 12.", "That is $12", "12.0", "The answer is **12**"]
    assert [score(text, "12") for text in right] == [1.0] * len(right)
    assert [score(text, "12") for text in ("", "13", "12 of 30", "none")] == [0.0] * 4
    assert score("It is 1,200.", "1200") == 1.0 and score("-3", "3") == 0.0
    cases = (("12", "stop"), ("12", "length"), ("", "stop"))
    assert [names["finished"](text, "12", reason) for text, reason in cases] == [1.0, 0.0, 0.0]


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


def test_a_tokenizer_without_a_template_gets_chatml_if_it_has_its_tokens_else_the_bare_text(tmp_path, monkeypatch):
    folder = tmp_path / "my"
    assert main(["init", str(folder), "--model", model(tmp_path / "model", 2048, None)]) == 0
    assert (folder / "chat_template.jinja").read_text() == BUILT_IN["chatml"]
    assert "chatml" in (folder / "config.yaml").read_text()
    monkeypatch.setattr("meshrl.tools.init.CHATML_TOKENS", ("<absent>",))
    other = tmp_path / "other"
    assert main(["init", str(other), "--model", str(tmp_path / "model")]) == 0
    assert "message['content']" in (other / "chat_template.jinja").read_text()
    load_task(load_run(other / "config.yaml", []).config, Objects(), training=True)


def test_what_can_not_work_is_refused_and_nothing_is_written(tmp_path, capsys):
    small = model(tmp_path / "small", 24)
    for arguments, printed in (
        ([str(tmp_path), "--model", small], "already exists"),
        ([str(tmp_path / "my"), "--model", small], "max_position_embeddings"),
        ([str(tmp_path / "my"), "--model", str(tmp_path / "none")], "none does not exist; give a model's folder"),
    ):
        assert main(["init", *arguments]) != 0
        assert printed in capsys.readouterr().err
    assert not (tmp_path / "my").exists() and not list(tmp_path.glob("*.aside"))


def test_the_tasks_are_tried_from_long_to_short():
    assert [task.max_new_tokens for task in TASKS] == sorted((task.max_new_tokens for task in TASKS), reverse=True)
