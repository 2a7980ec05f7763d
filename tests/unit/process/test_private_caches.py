"""PyTorch's compiler loads no code from a folder that another user has made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from outsider import OTHER_USER

from meshrl.process import spawn
from meshrl.process.spawn import CACHES

SCRIPT = """
import os
import torch._dynamo.package
from meshrl.config.cluster import ClusterConfig
from meshrl.cluster.worker import prepare_ranks
prepare_ranks(ClusterConfig(executor="inline"))
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
PyCodeCache.write("x = 1")
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], cache_dir(), triton_cache_dir(0), FxGraphCache._get_tmp_dir())
"""


def test_code_is_compiled_in_a_folder_of_the_user(tmp_path: Path):
    """Also if PyTorch was imported before, which sets the variable to its default, in a temporary folder that is
    shared, where another user has made it."""
    temporary, planted = tmp_path / "t", tmp_path / "t" / "torchinductor_victim"
    temporary.mkdir()
    temporary.chmod(0o1777)
    planted.mkdir()
    planted.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(planted, OTHER_USER, OTHER_USER)
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    own = {"TMPDIR": str(temporary), "LOGNAME": "victim", "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, env=environment | own, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert list(planted.iterdir()) == [], "nothing was written there, so nothing is read"
    used = [Path(text) for text in ran.stdout.split()]
    assert all(path.is_relative_to(tmp_path / "home" / ".cache" / "meshrl" / "torchinductor") for path in used), used
    assert (tmp_path / "home" / ".cache" / "meshrl").stat().st_mode & 0o777 == 0o700


def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> Path:
    """The folder that this process sets for compiled code. value: of the variable before."""
    monkeypatch.setattr(spawn, "_temporary", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in CACHES:
        monkeypatch.setenv(name, value or "")
    spawn.use_private_caches()
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_a_folder_that_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert _caches(tmp_path, monkeypatch, "/mine") == Path("/mine")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_cache_that_another_user_can_write_is_replaced_by_a_temporary_folder(tmp_path, monkeypatch, mode: int):
    (tmp_path / "cache" / "meshrl").mkdir(parents=True)
    (tmp_path / "cache" / "meshrl").chmod(mode)
    used = _caches(tmp_path, monkeypatch, None)
    assert used.parent.parent == tmp_path and used.parent.name.startswith("meshrl_")
    assert list((tmp_path / "cache" / "meshrl").iterdir()) == []
