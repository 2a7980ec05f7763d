"""A script: a run that waits after its first step until a file appears, so that a test can look at its processes.

    gated_run.py CONFIG GATE [OVERRIDE ...]

GATE is a folder. The controller writes GATE/store (the address of the launcher's store) and GATE/reached, and waits for
GATE/open. Under torchrun the other processes wait for GATE/follow before they begin.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import meshrl


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def main(config: str, folder: str, *overrides: str) -> None:
    gate = Path(folder)
    if int(os.environ.get("RANK", "0")) > 0:
        _wait_for(gate / "follow")
    elif "MASTER_PORT" in os.environ:
        (gate / "new").write_text(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
        (gate / "new").rename(gate / "store")

    def on_step(step: int, metrics: Any) -> None:
        if step == 1:
            (gate / "reached").touch()
            _wait_for(gate / "open")

    meshrl.train(config, overrides, on_step=on_step, quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
