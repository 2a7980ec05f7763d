"""The batch file that `meshrl launch slurm` writes: torchrun on every node of the job, one rank a GPU.

Imported without torch: the file is written on a login node.
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
    """What the batch file asks of Slurm. None leaves a choice to the cluster's defaults.

    gpus_per_node None: as many as the config has ranks for each node; 0: that many ranks, on CPUs.
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

# Every node runs this environment and reads and writes these folders: they must be on a file system that all see.
cd {folder}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR="$head" MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) PYTHON={python}

# One torchrun a node; a node's number gives its ranks, so that the same job places the same ranks alike.
srun --kill-on-bad-exit=1 bash -c 'exec "$PYTHON" -m torch.distributed.run \\
  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={ranks} \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  -m "$@"' torchrun {run}
"""


def batch_file(load: Load, config: str, overrides: Sequence[str], job: SlurmJob) -> str:
    """The text of the file. What the job's size says of the number of ranks is added to the overrides.

    Raises: ConfigError when the config can't run, or can't run on so many GPUs.
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
            f"cluster.executor is {cluster.executor}, but the batch file starts the ranks by torchrun. Use processes"
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
    """All GPUs of the job but those that only sample train."""
    if not job.gpus_per_node:
        return []
    training = job.nodes * job.gpus_per_node - config.cluster.num_rollout_ranks
    if training < 1:
        raise ConfigError(
            f"--nodes {job.nodes} x --gpus-per-node {job.gpus_per_node} leaves none to train beside "
            f"cluster.num_rollout_ranks = {config.cluster.num_rollout_ranks}"
        )
    return [f"cluster.num_train_ranks={training}"]
