"""The batch file that `meshrl launch slurm` writes: torchrun on every node of the job, one rank for each GPU.

This module does not import torch: the file is written on a login node.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.config.load import Loaded
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import ConfigError

Load = Callable[[Sequence[str]], Loaded[RunConfig] | Loaded[SftRunConfig]]
"""Reads and checks the config with these overrides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The resources that the batch file requests from Slurm. None = the cluster's default.

    gpus_per_node: None = one for each rank of the config; 0 = no GPUs, the ranks run on CPUs.
    """

    command: str
    nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None


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


def batch_file(load: Load, config: str, overrides: Sequence[str], job: SlurmJob) -> str:
    """The text of the file. The number of ranks that follows from the job's size is added to the overrides.

    Raises: ConfigError when the config can't run, or can't run on this number of GPUs.
    """
    if job.nodes < 1 or (job.gpus_per_node is not None and job.gpus_per_node < 0):
        raise ConfigError(
            f"--nodes {job.nodes} --gpus-per-node {job.gpus_per_node}: give 1 node or more, and 0 GPUs or more"
        )
    loaded = load(overrides)
    overrides = [*overrides, *_ranks(loaded.config, job)]
    cluster = load(overrides).config.cluster
    if cluster.executor != "processes":
        raise ConfigError(
            f"cluster.executor is {cluster.executor}, but the batch file starts ranks with torchrun; use processes"
        )
    ranks = cluster.num_train_ranks + cluster.num_rollout_ranks
    if ranks % job.nodes:
        raise ConfigError(
            f"{ranks} ranks (cluster.num_train_ranks + cluster.num_rollout_ranks) can't be spread evenly over --nodes "
            f"{job.nodes}; give --gpus-per-node, or change one of the numbers"
        )
    local = ranks // job.nodes
    gpus = local if job.gpus_per_node is None else job.gpus_per_node
    directives = {
        "job-name": loaded.path.stem,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": local if not gpus else None,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": "%x-%j.log",
        "signal": "TERM@120",
    }
    run = ["meshrl", job.command, str(Path(config).resolve()), *overrides]
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        ranks=local,
        run=" ".join(map(shlex.quote, run)),
    )


def _ranks(config: RunConfig | SftRunConfig, job: SlurmJob) -> list[str]:
    """The override that makes all GPUs of the job train, except those of ranks that only sample."""
    if not job.gpus_per_node:
        return []
    training = job.nodes * job.gpus_per_node - config.cluster.num_rollout_ranks
    if training < 1:
        raise ConfigError(
            f"--nodes {job.nodes} x --gpus-per-node {job.gpus_per_node} leaves no GPU to train after "
            f"cluster.num_rollout_ranks = {config.cluster.num_rollout_ranks}; request more GPUs"
        )
    return [f"cluster.num_train_ranks={training}"]
