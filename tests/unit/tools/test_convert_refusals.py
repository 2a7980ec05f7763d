"""`meshrl convert` of a damaged or forged training state: it fails with the file's name and leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from meshrl.core.errors import MeshrlError
from meshrl.tools.convert import convert
from meshrl.train.checkpoint_files import (
    CONTROLLER,
    Manifest,
    commit,
    make_temporary_folder,
    read_controller,
    read_manifest,
    write_json,
)

STATE = Path(__file__).parents[2] / "fixtures/former_run/runs/run/checkpoints/step_000002/state"


@pytest.mark.parametrize("name", ["manifest.json", CONTROLLER])
def test_a_flipped_bit_is_found_before_weights_are_read(tmp_path: Path, name: str):
    """The manifest has a hash of every file and of itself; tests/dist/test_checkpoint_reshard.py has the tensors."""
    state = Path(shutil.copytree(STATE, tmp_path / "step_000002" / "state"))
    data = bytearray((state / name).read_bytes())
    data[len(data) // 2] ^= 1
    (state / name).write_bytes(data)
    with pytest.raises(MeshrlError, match=name):
        convert(state, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("config", [{}, None, [], {"model": 1}, {"model": {"path": "x", "dtype": "int4"}}])
def test_a_forged_controller_is_refused_by_name(tmp_path: Path, config: Any):
    """With new hashes in the manifest, as an attacker would write them."""
    manifest, saved = read_manifest(STATE), read_controller(STATE)
    forged = tmp_path / "step_000002" / "state"
    aside = make_temporary_folder(forged)
    for name in manifest.files:
        if name != CONTROLLER:
            shutil.copy(STATE / name, aside / name)
    fact = write_json(aside / CONTROLLER, saved | {"config": config})
    files = {**manifest.files, CONTROLLER: fact}
    commit(forged, Manifest(step=manifest.step, num_ranks=manifest.num_ranks, files=files))
    with pytest.raises(MeshrlError, match=f"{CONTROLLER} does not contain the config of the run"):
        convert(forged, tmp_path / "out")
    assert not (tmp_path / "out").exists()
