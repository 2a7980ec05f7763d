"""How the processes of a run under torchrun get its token: neither a forged address in the store, nor a file of another
user, nor one that others could have read is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.core.errors import MeshrlError
from meshrl.process import run_token
from meshrl.process.run_token import VARIABLE, RunToken, read_announcement

NAME = "meshrl/controller/0"
ADDRESS = ("10.0.0.1", 4123)
OTHER_USER = 65534


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(run_token, "_VISIBLE_S", 0.0)
    return monkeypatch


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(".meshrl-token-*"))


def test_a_follower_gets_address_and_key_by_a_file_that_only_this_user_can_read(tmp_path):
    """Also with a umask that would let others read it, in a folder that does not exist yet. The file is removed."""
    before = os.umask(0)
    try:
        token = RunToken(tmp_path / "new" / "runs")
    finally:
        os.umask(before)
    (file,) = _files(tmp_path / "new" / "runs")
    assert file.stat().st_mode == 0o100600
    text = token.announcement(NAME, ADDRESS)
    assert file.read_text() not in text and token.key.hex() not in text
    assert read_announcement(text.encode(), NAME, tmp_path / "new" / "runs") == (ADDRESS, token.key)
    token.remove()
    token.remove()
    assert _files(tmp_path / "new" / "runs") == []


def test_two_runs_have_different_keys(tmp_path):
    tokens = [RunToken(tmp_path) for _ in range(2)]
    assert tokens[0].key != tokens[1].key and len(_files(tmp_path)) == 2


def test_the_environment_replaces_the_file(tmp_path, environment):
    environment.setenv(VARIABLE, "a secret of the user, in any form: é")
    token = RunToken(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    text = token.announcement(NAME, ADDRESS)
    assert read_announcement(text.encode(), NAME, tmp_path / "of this machine") == (ADDRESS, token.key)
    environment.setenv(VARIABLE, "another")
    assert RunToken(tmp_path).key != token.key
    with pytest.raises(MeshrlError, match=r"its proof was not made with the secret of this process.*MESHRL_TOKEN"):
        read_announcement(text.encode(), NAME, tmp_path)
    environment.delenv(VARIABLE)
    with pytest.raises(MeshrlError, match="MESHRL_TOKEN is set in the controller, but not in this process"):
        read_announcement(text.encode(), NAME, tmp_path)


def test_a_follower_with_the_variable_does_not_accept_a_file(tmp_path, environment):
    text = RunToken(tmp_path).announcement(NAME, ADDRESS)
    environment.setenv(VARIABLE, "secret")
    with pytest.raises(MeshrlError, match="MESHRL_TOKEN is set in this process, but not in the controller"):
        read_announcement(text.encode(), NAME, tmp_path)


@pytest.mark.parametrize(
    ("forge", "complaint"),
    [
        (lambda text: text.replace("10.0.0.1", "10.0.0.66"), "proof was not made with"),
        (lambda text: text.replace("4123", "4124"), "proof was not made with"),
        (lambda text: text[:-64] + "0" * 64, "proof was not made with"),
        (lambda text: text + " more", "expected: HOST PORT FILE PROOF"),
        (lambda text: text.split()[0], "expected: HOST PORT FILE PROOF"),
        (lambda text: "\n".join(text.split()), "expected: HOST PORT FILE PROOF"),
        (lambda text: text.replace(text.split()[2], "../../tmp/" + "a" * 22), "expected: HOST PORT FILE PROOF"),
        (lambda text: text.replace(text.split()[2], "a" * 32), "can't be read: No such file or directory"),
        (lambda text: "\0\udcff" * 200, "expected: HOST PORT FILE PROOF"),
    ],
)
def test_a_forged_announcement_is_refused(tmp_path, forge: Callable[[str], str], complaint: str):
    text = RunToken(tmp_path).announcement(NAME, ADDRESS)
    with pytest.raises(MeshrlError, match=complaint):
        read_announcement(forge(text).encode(errors="surrogateescape"), NAME, tmp_path)


def test_the_announcement_of_an_earlier_start_is_refused(tmp_path):
    text = RunToken(tmp_path).announcement(NAME, ADDRESS)
    with pytest.raises(MeshrlError, match="proof was not made with"):
        read_announcement(text.encode(), "meshrl/controller/1", tmp_path)


def _as_link(file: Path) -> None:
    file.rename(file.with_name("target"))
    file.symlink_to(file.with_name("target"))


def _as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, mode=0o600)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda file: file.chmod(0o640), "its permissions are 640; allowed: none for group and others"),
        (lambda file: file.chmod(0o602), "its permissions are 602"),
        (_as_link, "can't be read: Too many levels of symbolic links"),
        (_as_pipe, "it is not a regular file"),
        (lambda file: file.write_text("x" * 64), "it does not contain 64 hexadecimal digits"),
        (lambda file: file.write_text(""), "it does not contain 64 hexadecimal digits"),
        (lambda file: file.unlink(), "can't be read: No such file"),
    ],
)
def test_a_file_that_another_process_could_have_made_or_read_is_refused(tmp_path, change, complaint: str):
    text = RunToken(tmp_path).announcement(NAME, ADDRESS)
    change(_files(tmp_path)[0])
    with pytest.raises(MeshrlError, match=complaint + r".*the same run\.folder.*MESHRL_TOKEN to the same secret"):
        read_announcement(text.encode(), NAME, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused_although_its_proof_is_right(tmp_path):
    text = RunToken(tmp_path).announcement(NAME, ADDRESS)
    os.chown(_files(tmp_path)[0], OTHER_USER, OTHER_USER)
    with pytest.raises(MeshrlError, match=f"its owner has the user id {OTHER_USER}, this process has 0"):
        read_announcement(text.encode(), NAME, tmp_path)


def test_a_controller_whose_folder_does_not_keep_permissions_refuses_to_start(tmp_path, environment):
    """Some network file systems show one mode for all files."""
    real = os.fstat

    def shared(fd: int) -> os.stat_result:
        facts = list(real(fd))
        facts[0] |= 0o044
        return os.stat_result(facts)

    environment.setattr(os, "fstat", shared)
    with pytest.raises(MeshrlError, match=r"its permissions are 644.*or set MESHRL_TOKEN"):
        RunToken(tmp_path)
    environment.undo()
    assert _files(tmp_path) == []
