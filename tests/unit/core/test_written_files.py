"""A reader sees a complete file: the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshrl.core.files import is_private, replacing, write_text


def test_a_written_file_replaces_the_old_one_and_leaves_no_other_file(tmp_path: Path):
    path = tmp_path / "status.json"
    write_text(path, "old")
    write_text(path, "né")
    assert path.read_bytes() == "né".encode() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mode", "private"), [(0o755, True), (0o700, True), (0o775, False), (0o757, False), (0o720, False)]
)
def test_a_folder_that_a_group_or_others_can_write_is_not_private(tmp_path: Path, mode: int, private: bool):
    tmp_path.chmod(mode)
    assert is_private(tmp_path) == private
    assert not is_private(tmp_path / "missing")


@pytest.mark.parametrize(
    ("group", "members", "private"),
    [("ann", [], True), ("ann", ["ann"], True), ("ann", ["bob"], False), ("lab", [], False)],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder any group")
def test_the_group_of_one_user_alone_may_write(tmp_path: Path, monkeypatch, group, members, private):
    tmp_path.chmod(0o775)
    gid = 12345
    os.chown(tmp_path, -1, gid)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_gid=gid, pw_name="ann"))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    assert is_private(tmp_path) == private


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
