"""From a checkpoint to a folder that `from_pretrained` loads: in one process, without the ranks that wrote it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meshrl.core.errors import CheckpointError
from meshrl.loops.resume import state_in
from meshrl.model.load import DTYPES, cast_parameters, load_causal_lm
from meshrl.model.save import save_pretrained
from meshrl.train.checkpoint_files import CONTROLLER, read_controller
from meshrl.train.state import load_model, persistent_buffers


def convert(checkpoint: Path, out: Path) -> None:
    """Write the policy of `checkpoint` to `out`, in the dtype that its run computed in, with the tokenizer.

    Needs the model folder that the run began with, and host memory for the whole model in its master dtype.
    Raises: CheckpointError when the checkpoint is not whole, or when `out` is there already.
    """
    if out.exists():
        raise CheckpointError(f"{out} is there already; give a folder that is not")
    folder = state_in(checkpoint)
    path, dtype, master_dtype = _model_of(folder)
    lm = load_causal_lm(path, dtype=DTYPES[master_dtype])
    load_model(folder, lm)
    cast_parameters(lm, DTYPES[dtype])
    weights = [(name, p.detach()) for name, p in lm.named_parameters()]
    sizes = [(name, p.numel() * p.element_size()) for name, p in weights]
    aside = out.with_name(out.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    save_pretrained(lm, sizes, weights, persistent_buffers(lm), aside, path)
    os.rename(aside, out)


def _model_of(folder: Path) -> tuple[str, str, str]:
    """Where the run's model came from, the dtype that it computed in, and that of its masters; both in DTYPES."""
    saved = read_controller(folder)
    try:
        model, train = saved["config"]["model"], saved["config"]["train"]
        told = str(model["path"]), str(model["dtype"]), str(train["master_dtype"])
        if not {*told[1:]} <= DTYPES.keys():
            raise ValueError(f"dtypes {told[1]!r} and {told[2]!r}")
        return told
    except (KeyError, TypeError, ValueError) as cause:
        raise CheckpointError(
            f"{folder / CONTROLLER} does not say which model the run began with: {type(cause).__name__}: {cause}. It "
            "is of another version, or was changed"
        ) from cause
