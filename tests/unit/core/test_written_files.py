"""A reader sees a complete file: the old one or the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.core.files import replacing, write_text


def test_a_written_file_replaces_the_old_one_and_leaves_no_other_file(tmp_path: Path):
    path = tmp_path / "status.json"
    write_text(path, "old")
    write_text(path, "né")
    assert path.read_bytes() == "né".encode() and list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "best.json"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    path.with_name("best.json.aside").write_text("of a killed process")
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_starts_empty_and_never_replaces_files_of_another(tmp_path: Path):
    path = tmp_path / "model"
    (tmp_path / "model.aside").mkdir()
    (tmp_path / "model.aside" / "left.bin").touch()
    with replacing(path) as aside:
        aside.mkdir()
        (aside / "config.json").touch()
    assert [file.name for file in path.iterdir()] == ["config.json"]
    with pytest.raises(OSError), replacing(path) as aside:
        aside.mkdir()
    assert [file.name for file in path.iterdir()] == ["config.json"]
