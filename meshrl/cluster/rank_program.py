"""The program of a rank's process, and what each such process has. No torch is imported, so that the processes of a run
can import it while the controller still does."""

from __future__ import annotations

import os
import sys

from meshrl.config.cluster import ClusterConfig
from meshrl.core.terminal import open_standard_streams
from meshrl.process.private_caches import use_private_caches
from meshrl.process.spawn import Program, prepare

RANK = Program(
    "meshrl.cluster.worker",
    preload=("meshrl.cluster.actors", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
)


def common_environment() -> dict[str, str]:
    """Environment variables of every rank: it must find all modules that its controller finds."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TOKENIZERS_PARALLELISM": "false"}


def prepare_ranks(cluster: ClusterConfig) -> None:
    """Let modules of the working folder be found, and start the imports of this machine's ranks. Under torchrun they
    start later, with environment variables that the controller sends. Safe to call again."""
    open_standard_streams()  # ranks inherit them
    use_private_caches()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a dotted path in the config may name a module in the working folder
    if cluster.executor == "processes" and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        prepare(RANK, common_environment())
