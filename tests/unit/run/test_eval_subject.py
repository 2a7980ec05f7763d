"""What `meshrl eval` evaluates, by the files of a folder. No run is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.core.errors import CheckpointError, ConfigError
from meshrl.run.subject import find_subject, subject_of


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a model after step 2 and one after step 10."""
    run = tmp_path / "runs" / "one"
    for step in (2, 10):
        model(run / "checkpoints" / f"step_{step:06d}" / "model")
    (run / "config.yaml").write_text("{}")
    return run


def best(run: Path, step: int, path: str) -> None:
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": step, "score": 0.5, "model": path}))


def test_a_model_is_itself_and_belongs_to_the_run_that_wrote_it(run: Path, tmp_path: Path):
    alone = model(tmp_path / "alone")
    assert (find_subject(alone).model, find_subject(alone).run) == (str(alone), None)
    path = run / "checkpoints" / "step_000010" / "model"
    found = find_subject(path)
    assert (found.model, found.run, found.step) == (str(path), run, 10)
    assert find_subject("organisation/name").model == "organisation/name"


def test_the_folder_of_a_step_names_its_model(run: Path):
    found = find_subject(run / "checkpoints" / "step_000002")
    assert (found.model, found.run, found.step) == (str(run / "checkpoints" / "step_000002" / "model"), run, 2)


@pytest.mark.parametrize("given", [".", "checkpoints"])
def test_a_run_without_a_best_model_names_its_newest(run: Path, given: str):
    found = find_subject(run / given)
    assert Path(found.model or "").parent.name == "step_000010" and found.step == 10
    assert "the newest of" in found.text


def test_a_run_names_its_best_model_and_the_newest_is_stated(run: Path):
    best(run, 2, "step_000002/model")
    found = find_subject(run)
    assert Path(found.model or "").parent.name == "step_000002" and (found.run, found.step) == (run, 2)
    assert "after 2 steps, held-out score 0.5" in found.text and "the newest is in" in found.text
    best(run, 10, "step_000010/model")
    assert "newest" not in find_subject(run).text
    best(run, 0, "organisation/name")
    found = find_subject(run)
    assert (found.model, found.step) == ("organisation/name", 0) and "before training" in found.text


def test_a_best_model_that_was_removed_is_not_chosen(run: Path):
    best(run, 5, "step_000005/model")
    assert find_subject(run).step == 10
    for path in (run / "checkpoints").glob("step_*/model/config.json"):
        path.unlink()
        path.parent.rmdir()
    with pytest.raises(CheckpointError, match="names a model that is gone"):
        find_subject(run)


def test_a_folder_that_is_neither_a_model_nor_a_run_is_refused(tmp_path: Path, run: Path):
    for folder in (tmp_path, run.parent):
        with pytest.raises(ConfigError, match=r"neither a model \(it has no config.json\), nor a run"):
            find_subject(folder)


def test_a_misspelt_run_is_no_hub_id(run: Path, monkeypatch):
    (run / "status.json").touch()
    monkeypatch.chdir(run.parent.parent)
    near = f"{run.parent.name}/{run.name}"
    with pytest.raises(ConfigError, match=f"{near}x does not exist; give a model's folder.*did you mean {near}?"):
        find_subject(f"{near}x")


def test_a_folder_of_a_run_stands_for_its_config(run: Path, tmp_path: Path):
    step = run / "checkpoints" / "step_000002"
    for folder, number in ((run, 10), (step, 2), (step / "model", 2)):
        config, found = subject_of(str(folder), None)
        assert config == run / "config.yaml" and found.step == number
    config, found = subject_of(run, step)
    assert config == run / "config.yaml" and found.step == 2
    alone = model(tmp_path / "alone")
    assert subject_of("my.yaml", alone)[0] == "my.yaml"
    assert subject_of("my.yaml", None)[1].overrides(["a=1"]) == ["a=1"]
    with pytest.raises(ConfigError, match="belongs to no run with a config"):
        subject_of(alone, None)
    (run / "config.yaml").write_text("sft: {path: rows.jsonl}")
    with pytest.raises(ConfigError, match=f"no rewards; .* meshrl eval CONFIG --model {run}"):
        subject_of(run, None)
