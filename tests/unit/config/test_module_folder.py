"""A module of a reward or an agent is found in the folder of the config file, whatever the working folder is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from outsider import OTHER_USER
from tiny_run import steps_of, write_run

from meshrl.api import evaluate, train
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError
from meshrl.core.lookup import import_object


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config next to its reward's module, and another working folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine").mkdir()
    path = write_run(tmp_path / "mine")
    name = f"reward_{tmp_path.name}"  # each test has a module of its own
    (path.parent / f"{name}.py").write_text("def length(completion, answer):\n    return len(completion) / 10\n")
    path.write_text(path.read_text().replace("tiny_run:ascii_share", f"{name}:length"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return path


def test_a_run_finds_its_reward_next_to_its_config(config):
    run = train(config, ["loop.num_steps=1", "cluster.executor=inline", "run.name=one"], quiet=True)
    assert steps_of(run.folder)[0]["reward/mean"] > 0
    rows = f"data.eval_path={config.parent / 'rows.jsonl'}"
    assert evaluate(run.folder, [rows, "loop.eval_samples=1"], quiet=True).metrics["eval/mean_at_k"] > 0


def test_the_config_of_a_run_names_the_folder_for_a_later_evaluation(config, tmp_path):
    loaded = load_run_config(config)
    assert loaded.config.run.module_folder == str(config.parent)
    assert loaded.origins["run.module_folder"] == f"default, here {config.parent}"
    (tmp_path / "run").mkdir()
    text = config.read_text().replace('"run": {', f'"run": {{"module_folder": "{config.parent}", ')
    (tmp_path / "run" / "config.yaml").write_text(text)
    copied = load_run_config(
        tmp_path / "run" / "config.yaml", ["model.path=../mine/model", "data.path=../mine/rows.jsonl"]
    )
    assert copied.config.run.module_folder == str(config.parent)


def test_a_module_next_to_a_config_does_not_replace_an_installed_one(config):
    (config.parent / "xxhash.py").write_text("raise RuntimeError('imported')\n")
    load_run_config(config)
    assert import_object("xxhash:xxh3_64")


def _sent_run(folder: Path, kind: str, module_folder: str) -> Path:
    """A run that another user has written, with a module and a program in it and one next to it."""
    run = folder / "runs" / "sent"
    shutil.copytree(folder / "mine" / "model", run / "checkpoints" / "step_000001" / "model")
    (folder / "theirs").mkdir()
    for place in (run / "planted.py", folder / "theirs" / "planted_too.py"):
        code = f"from pathlib import Path\nPath({str(folder / 'mark')!r}).touch()\n"
        place.write_text(f"{code}def f(completion, answer):\n    return 1.0\n")
    (run / "python").write_text(f"#!/bin/sh\ntouch {folder / 'mark'}\n")
    (run / "python").chmod(0o755)
    (run / "config.yaml").write_text(
        f"run: {{module_folder: {module_folder}}}\nmodel: {{path: {folder / 'mine' / 'model'}}}\n"
        f"data: {{eval_path: {folder / 'mine' / 'rows.jsonl'}}}\nreward: {{terms: {{x: {{kind: {kind}}}}}}}\n"
    )
    for path in (run, folder / "theirs"):
        os.chmod(path, 0o777)  # as another user's, where this process can't change the owner
    if os.geteuid() == 0:
        for path in [folder / "theirs", *folder.joinpath("runs").rglob("*")]:
            os.chown(path, OTHER_USER, OTHER_USER)
    return run


@pytest.mark.parametrize(
    "kind, module_folder, working_folder, refusal",
    [
        ("planted:f", "null", "elsewhere", "no module of a run's folder is imported.*set\\s+PYTHONPATH=.*/runs/sent"),
        ("planted:f", "RUN", "elsewhere", "no module of a run's folder is imported"),
        ("planted:f", "..", "elsewhere", "no module of a run's folder is imported"),
        ("runs.sent.planted:f", "null", ".", "no module of a run's folder is imported"),
        ("sent.planted:f", "..", "runs", "no module of a run's folder is imported"),
        ("planted_too:f", "THEIRS", "elsewhere", "no such module"),
        ("length", "null", "runs/sent", "modules of the working folder are imported"),
        ("length", "null", "runs/sent/checkpoints", "modules of the working folder are imported"),
    ],
)
def test_an_evaluation_of_a_run_imports_nothing_that_the_sender_of_the_run_has_written(
    config, tmp_path, monkeypatch, kind, module_folder, working_folder, refusal
):
    run = _sent_run(tmp_path, kind, "X")
    text = (run / "config.yaml").read_text()
    places = {"RUN": str(run), "THEIRS": str(tmp_path / "theirs")}
    (run / "config.yaml").write_text(text.replace("X", places.get(module_folder, module_folder)))
    monkeypatch.chdir(tmp_path / working_folder)
    with pytest.raises(ConfigError, match=f"(?s){refusal}"):
        evaluate(run, quiet=True)
    assert not (tmp_path / "mark").exists()


def test_the_folder_of_a_sent_run_may_be_given_on_purpose(config, tmp_path, monkeypatch):
    run = _sent_run(tmp_path, "planted:f", "null")
    chosen = [
        "cluster.executor=inline",
        "loop.eval_samples=1",
        "data.max_prompt_tokens=64",
        "rollout.sampling.max_new_tokens=4",
        f"run.module_folder={run}",
    ]
    assert evaluate(run, chosen, out=tmp_path / "out", quiet=True).metrics["eval/mean_at_k"] == 1.0
    text = (run / "config.yaml").read_text().replace("planted:f", "length")
    (run / "config.yaml").write_text(f"{text}rollout: {{engine: vllm, vllm: {{python: {run / 'python'}}}}}\n")
    with pytest.raises(ConfigError, match=r"(?s)another user may have written it.*add\s+rollout.vllm.python="):
        evaluate(run, quiet=True)


def test_a_module_that_is_nowhere_is_refused_before_the_run(config):
    with pytest.raises(ConfigError, match="no_such_module"):
        load_run_config(config, ["reward.terms.ascii.kind=no_such_module:f"])
