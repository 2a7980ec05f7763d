"""The batch file that `meshrl launch slurm` writes: torchrun on every node of the job, one rank for each GPU.

This module does not import torch: the file is written on a login node.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import ConfigError

Load = Callable[[Sequence[str]], Loaded[RunConfig] | Loaded[SftRunConfig]]
"""Reads and checks the config with these overrides."""

_SCRIPT = """\
#!/bin/bash
{directives}

# Every node uses this environment and these folders: they must be on a file system that all nodes share.
cd {folder}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR="$head" MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) PYTHON={python}

# One torchrun for each node. The node's number decides its ranks, so the same job places its ranks in the same way.
srun --kill-on-bad-exit=1 bash -c 'exec "$PYTHON" -m torch.distributed.run \\
  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={ranks} \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  -m "$@"' torchrun {run}
"""


def batch_file(
    load: Load,
    command: str,
    config: str,
    overrides: Sequence[str],
    nodes: int,
    gpus_per_node: int | None,
    options: Mapping[str, str | None],
) -> str:
    """The text of the file. The number of ranks that follows from the job's size is added to the overrides.

    gpus_per_node: None = one for each rank of the config; 0 = no GPUs, the ranks run on CPUs. options: of sbatch; None
    = the default of the cluster. Raises: ConfigError when the config can't run, or can't run on this number of GPUs.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: give 1 or more")
    if gpus_per_node is not None and gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node {gpus_per_node}: give 0 or more")
    loaded = load(overrides)
    if gpus_per_node:
        overrides = [*overrides, _train_ranks(loaded.config.cluster.num_rollout_ranks, nodes, gpus_per_node)]
    cluster = load(overrides).config.cluster
    if cluster.executor != "processes":
        raise ConfigError(
            f"cluster.executor is {cluster.executor}, but the batch file starts ranks with torchrun; use processes"
        )
    ranks = cluster.num_train_ranks + cluster.num_rollout_ranks
    if ranks % nodes:
        raise ConfigError(
            f"{ranks} ranks (cluster.num_train_ranks + cluster.num_rollout_ranks) can't be spread evenly over --nodes "
            f"{nodes}; give --gpus-per-node, or change one of the numbers"
        )
    local = ranks // nodes
    gpus = local if gpus_per_node is None else gpus_per_node
    directives = {
        "job-name": loaded.path.stem,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": local if not gpus else None,
        **options,
        "output": "%x-%j.log",
        "signal": "TERM@120",
    }
    run = ["meshrl", command, str(Path(config).resolve()), *overrides]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        ranks=local,
        run=" ".join(map(shlex.quote, run)),
    )


def _train_ranks(num_rollout_ranks: int, nodes: int, gpus_per_node: int) -> str:
    """The override that makes all GPUs of the job train, except those of ranks that only sample."""
    training = nodes * gpus_per_node - num_rollout_ranks
    if training < 1:
        raise ConfigError(
            f"--nodes {nodes} x --gpus-per-node {gpus_per_node} leaves no GPU to train after "
            f"cluster.num_rollout_ranks = {num_rollout_ranks}; request more GPUs"
        )
    return f"cluster.num_train_ranks={training}"
