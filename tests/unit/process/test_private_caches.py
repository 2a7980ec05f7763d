"""PyTorch's compiler loads no code from a folder that another user has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from outsider import OTHER_USER

from meshrl.process.spawn import CACHES

SCRIPT = """
import os
from meshrl.config.cluster import ClusterConfig
from meshrl.cluster.worker import prepare_ranks
{before}
prepare_ranks(ClusterConfig(executor="inline"))
import torch
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
PyCodeCache.write("x = 1")
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], cache_dir(), triton_cache_dir(0), FxGraphCache._get_tmp_dir())
"""


def _run(tmp_path: Path, before: str = "", **variables: str) -> list[Path]:
    """The folders of compiled code in a process whose temporary folder is shared, and has a folder of another user in
    place of PyTorch's."""
    temporary, planted = tmp_path / "t", tmp_path / "t" / "torchinductor_victim"
    temporary.mkdir()
    temporary.chmod(0o1777)
    planted.mkdir()
    planted.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(planted, OTHER_USER, OTHER_USER)
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    own = {"TMPDIR": str(temporary), "LOGNAME": "victim", "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    ran = subprocess.run(command, env=environment | own | variables, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert list(planted.iterdir()) == [], "nothing was written there, so nothing is read"
    return [Path(text) for text in ran.stdout.split()]


@pytest.mark.parametrize("before", ["", "import torch._dynamo.package"])
def test_code_is_compiled_in_a_folder_of_the_user(tmp_path: Path, before: str):
    """Also if PyTorch was imported before, which sets the variable to its default."""
    used = _run(tmp_path, before)
    assert all(path.is_relative_to(tmp_path / "home" / ".cache" / "meshrl" / "torchinductor") for path in used), used
    assert (tmp_path / "home" / ".cache" / "meshrl").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_the_user_has_set_stays(tmp_path: Path):
    assert _run(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "mine"))[0] == tmp_path / "mine"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_cache_that_another_user_can_write_is_replaced_by_a_temporary_folder(tmp_path: Path, mode: int):
    (tmp_path / "cache" / "meshrl").mkdir(parents=True)
    (tmp_path / "cache" / "meshrl").chmod(mode)
    used = _run(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert used[0].parent.parent == tmp_path / "t" and used[0].parent.name.startswith("meshrl_")
    assert list((tmp_path / "cache" / "meshrl").iterdir()) == []
