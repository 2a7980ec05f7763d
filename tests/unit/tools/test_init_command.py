"""`meshrl init`: what it writes is complete, fits the rows and the model, and is accepted by train and sft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_qwen2
from tiny_tokenizers import tiny_tokenizer

from meshrl.cli import main
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.run.inputs import Objects, load_run, load_sft
from meshrl.run.task import load_sft_source, load_task
from meshrl.tools.init import form_of, template

LABELS = ["billing", "not spam", "spam"]


def model(folder: Path, positions: int = 2048, template: str | None = "own") -> str:
    tokenizer = tiny_tokenizer()
    if template != "own":
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tiny_qwen2(vocab_size=len(tokenizer), max_position_embeddings=positions).save_pretrained(folder)
    return str(folder)


def tickets(folder: Path, count: int = 60, column: str = "label") -> str:
    rows = "".join(f'"ticket {i};\nplease";{LABELS[i % 3]}\n' for i in range(count))
    (folder / "tickets.csv").write_text(f"question;{column}\n{rows}only one value\n;spam\nlost;\nmore;\n", "utf-8-sig")
    return str(folder / "tickets.csv")


def test_sft_and_train_accept_what_it_writes_and_hold_out_the_same_rows(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "new" / "my"
    data = ["--data", tickets(tmp_path), "--answer", "label"]
    monkeypatch.setattr("meshrl.tools.init.SMALL_WIDTH", 0)
    assert main(["init", str(folder), "--model", model(tmp_path / "model"), *data]) == 0
    printed = capsys.readouterr().out
    assert "60 usable rows, with values separated by ';'" in printed and "3 labels: billing 33%" in printed
    assert f"left out 4 more that can't be used:\n  {data[1]}:122: 1 values for 2 columns" in printed
    assert f"meshrl train {folder}/config.yaml --explain" in printed and f"meshrl sft {folder}/sft.yaml" in printed
    monkeypatch.chdir("/")  # paths and modules are found next to the config, not in the working folder
    cfg = load_run(folder / "config.yaml").config
    task = load_task(cfg, Objects(), training=True)
    assert task.row_note is not None and "tickets.csv:122" in task.row_note and "tickets.csv:124" in task.row_note
    assert "tickets.csv:125" not in task.row_note and task.row_note.endswith("and 1 more")
    held_out = {prompt.id for prompt in task.eval_prompts}
    assert 0 < len(held_out) < 60 and task.train_prompts is not None
    trained = {prompt.id for prompt in task.train_prompts.next(60 - len(held_out))}
    assert len(held_out | trained) == 60 and task.num_eval_left_out == task.train_prompts.num_left_out == 0
    system = {"role": "system", "content": f"Answer with one of these labels and nothing else: {', '.join(LABELS)}"}
    assert task.eval_prompts[0].messages[0] == system
    source, _, notes, _ = load_sft_source(load_sft(folder / "sft.yaml").config, Objects())
    warm = source.next(len(trained))
    assert {row.trajectory_id.partition("@")[0] for row in warm} == trained and "left out 4 rows" in notes[0]
    assert "tickets.csv:124: column 'label' is an empty string; give the row an answer" in notes[0]
    decoded = task.tokenizer.decode(warm[0].tokens.tolist())
    assert system["content"] in decoded and decoded.rstrip().endswith("<|im_end|>")


def scores(answers: list[str], completions: list[str]) -> list[float]:
    """Of these completions for the first answer, by the reward for rows with these answers."""
    names: dict[str, Any] = {}
    exec(template("my_reward.txt", score=form_of(answers).score), names)
    return [names["score"](text, answers[0]) for text in completions]


def test_the_reward_for_numbers_reads_the_last_one():
    right = ["12", "5 + 7 = 12.", "That is $12", "12.0", "The answer is **12**", "of 30: 12"]
    assert scores(["$12", "1,200", "-3.5 "], right) == [1.0] * len(right)
    assert scores(["12", "7"], ["", "13", "12 of 30", "none", "-12"]) == [0.0] * 5


def test_the_reward_for_labels_needs_one_label_and_no_other_in_the_last_line():
    right = ["Spam", "It is **spam**.", "billing or not spam?\nspam"]
    assert scores(["spam", *LABELS * 10], right) == [1.0] * len(right)
    wrong = ["billing, spam, not spam", "not spam", "spammer", "", "spam\nor billing"]
    assert scores(["spam", *LABELS * 10], wrong) == [0.0] * len(wrong)


def test_other_answers_are_texts_or_mathematics():
    texts = [f"the red lamp {'x' * i}" for i in range(30)]
    assert scores(texts, ["The red lamp!", "lamp", "", "the red lamp and all the rest of it"]) == [1.0, 0.5, 0.0, 0.5]
    assert form_of([f"so\n#### {i}" for i in range(30)]).kind == "math_answer"


def test_a_tokenizer_without_a_template_gets_chatml_if_it_has_its_tokens_else_one_that_ends_a_turn(
    tmp_path, monkeypatch, capsys
):
    arguments = ["--model", model(tmp_path / "model", 2048, None), "--data", tickets(tmp_path, column="answer")]
    assert main(["init", str(tmp_path / "my"), *arguments]) == 0
    assert (tmp_path / "my" / "chat_template.jinja").read_text() == BUILT_IN["chatml"]
    assert "chatml" in (tmp_path / "my" / "config.yaml").read_text()
    monkeypatch.setattr("meshrl.tools.init.CHATML_TOKENS", ("<absent>",))
    other = tmp_path / "other"
    with (tmp_path / "tickets.csv").open("a") as file:
        file.write("same;spam\n" * 3)
    monkeypatch.setattr("meshrl.tools.init.MAX_READ", 66)
    assert "earlier row" not in capsys.readouterr().out and main(["init", str(other), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "rows whose question is that of an earlier row: 1\nof these, " in printed
    load_task(load_run(other / "config.yaml").config, Objects(), training=True)
    source, _, _, chat = load_sft_source(load_sft(other / "sft.yaml").config, Objects())
    assert source.next(1)[0].tokens[-1] in (chat.stop_token_ids or ())


def test_what_can_not_work_is_refused_and_nothing_is_written(tmp_path, capsys):
    data, small = tickets(tmp_path), model(tmp_path / "small", 24)
    (tmp_path / "same.csv").write_text("question,label\n" + "".join(f"{i},x\n" for i in range(60)))
    (tmp_path / "few.csv").write_text("question,label\nsame,x\nsame,y\n")
    (tmp_path / "empty.csv").write_text("question,label\n")
    (tmp_path / "notes.txt").write_text("a log\n")
    for folder, path, answer, printed in (
        (tmp_path, data, "label", "already exists"),
        (tmp_path / "my", data, "label", "reads 24 tokens (max_position_embeddings)"),
        (tmp_path / "my", data, "lable", "its columns are question, label; did you mean 'label'? name one by --answer"),
        (tmp_path / "my", f"{tmp_path}/same.csv", "label", "nothing to learn"),
        (tmp_path / "my", f"{tmp_path}/few.csv", "label", "too few different ones"),
        (tmp_path / "my", f"{tmp_path}/empty.csv", "label", "has no rows"),
        (tmp_path / "my", f"{tmp_path}/notes.txt", "label", "notes.txt:1: not JSON"),
        (tmp_path / "my", f"{tmp_path}/none.csv", "label", "no such file"),
    ):
        assert main(["init", str(folder), "--model", small, "--data", path, "--answer", answer]) != 0
        assert printed in capsys.readouterr().err
    assert main(["init", str(tmp_path / "my"), "--model", str(tmp_path / "none"), "--data", data]) != 0
    assert "none does not exist; give a model's folder" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "my"), "--model", "runs/none", "--data", data]) != 0
    assert "runs/none does not exist; give a model's folder" in capsys.readouterr().err
    assert not (tmp_path / "my").exists() and not list(tmp_path.glob("*.aside"))
