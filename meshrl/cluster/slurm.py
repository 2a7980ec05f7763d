"""The batch file that `meshrl launch slurm` writes: torchrun on every node of the job, one rank for each GPU.

This module does not import torch: the file is written on a login node.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from meshrl.config.case import Purpose
from meshrl.config.check import missing_here
from meshrl.config.load import Loaded
from meshrl.config.rollout import split_replica
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import ConfigError
from meshrl.monitor.sinks import read_metrics

Load = Callable[[Sequence[str]], Loaded[RunConfig] | Loaded[SftRunConfig]]
"""Reads and checks the config with these overrides."""

_SCRIPT = """\
#!/bin/bash
{directives}

{comments}
# The job gets complete nodes. For a part of each node, replace exclusive and mem=0 by cpus-per-task and a size of mem.

# Every node uses this environment and these folders: they must be on a file system that all nodes share.
cd {folder}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR="$head" MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000)) PYTHON={python}
# torchrun would set 1. A rank uses at most its share of the node's CPUs.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$SLURM_CPUS_ON_NODE}}"
# From SIGTERM to torchrun's SIGKILL, by default 30 s. PyTorch before 2.12 does not read it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown_s}

# One torchrun for each node. The node's number decides its ranks, so the same job places its ranks in the same way.
# Without cpus-per-task srun gives a task one core.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'exec "$PYTHON" -m torch.distributed.run \\
  --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node={ranks} \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  -m "$@"' torchrun {run}
"""


_CONTINUES = (
    "If Slurm starts the job again, the run continues from its newest checkpoint: after a preemption or a lost node if "
    "it was submitted with sbatch --requeue, and after scontrol requeue JOBID."
)
_STARTS_AGAIN = (
    "If Slurm may start the job again (sbatch --requeue, scontrol requeue JOBID), set run.name and run.resume=auto, so "
    "that the run continues from its newest checkpoint."
)
_DEFAULT_LEAD_S = 300
_MARGIN, _END_S = 1.5, 30  # later steps may be slower; the ranks end and the report is written
_MAX_LEAD_S = 65535  # of sbatch


@dataclass(frozen=True, slots=True)
class _Lead:
    """The time from the run's SIGTERM to the job's time limit. source: a text for the batch file."""

    seconds: int = _DEFAULT_LEAD_S
    source: str = (
        "This is a default: it must be longer than the longest step or evaluation and two saves of a checkpoint. To "
        "measure them, let a run save a training state before its last step, and use: meshrl launch slurm CONFIG "
        "--from runs/NAME"
    )


def batch_file(
    load: Load,
    command: Purpose,
    config: str,
    overrides: Sequence[str],
    nodes: int,
    gpus_per_node: int | None,
    options: Mapping[str, str | None],
    measured: Path | None = None,
) -> str:
    """The text of the file. The number of ranks that follows from the job's size is added to the overrides.

    gpus_per_node: None = one for each rank of the config; 0 = no GPUs, the ranks run on CPUs. options: of sbatch; None
    = the default of the cluster. measured: folder of a run, from which the time to end is taken.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: give 1 or more")
    if gpus_per_node is not None and gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node {gpus_per_node}: give 0 or more")
    loaded = load(overrides)
    if gpus_per_node:
        sampling = loaded.config.cluster.num_rollout_ranks  # all other GPUs of the job train
        if nodes * gpus_per_node <= sampling:
            raise ConfigError(
                f"--nodes {nodes} x --gpus-per-node {gpus_per_node} leaves no GPU to train after "
                f"cluster.num_rollout_ranks = {sampling}; request more GPUs"
            )
        overrides = [*overrides, f"cluster.num_train_ranks={nodes * gpus_per_node - sampling}"]
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
    rollout = loaded.config.rollout if isinstance(loaded.config, RunConfig) else None
    if rollout is not None and (text := split_replica(rollout, cluster.num_train_ranks, ranks, local)):
        raise ConfigError(f"--nodes {nodes}, {local} ranks on each: {text}")
    lead = _Lead() if measured is None else _measured_lead(measured)
    _check_time(options.get("time"), lead)
    gpus = local if gpus_per_node is None else gpus_per_node
    directives = {
        "job-name": loaded.path.stem,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "mincpus": local if not gpus else None,
        "exclusive": "",
        "mem": 0,
        **options,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{lead.seconds}",
    }
    lines = [f"#SBATCH --{name}={value}".removesuffix("=") for name, value in directives.items() if value is not None]
    continues = loaded.config.run.name != "auto" and loaded.config.run.resume == "auto"
    lead_text = f"The run gets SIGTERM {lead.seconds} s before the time limit, to end with a checkpoint. {lead.source}"
    comments = [lead_text, _CONTINUES if continues else _STARTS_AGAIN]
    lacks = [f"{each.keys[0]}: {each.text}" for each in missing_here(loaded.config, command)]
    comments += [f"The nodes need what this machine lacks: {text}" for text in lacks]
    run = ["meshrl", command, str(Path(config).resolve()), *overrides]
    return _SCRIPT.format(
        directives="\n".join(lines),
        comments="\n".join(map(_comment, comments)),
        folder=shlex.quote(str(Path.cwd())),
        python=shlex.quote(sys.executable),
        shutdown_s=lead.seconds - 10,  # from torchrun's SIGKILL to the time limit
        ranks=local,
        run=" ".join(map(shlex.quote, run)),
    )


def _measured_lead(folder: Path) -> _Lead:
    """A run that gets SIGTERM finishes its step or evaluation, waits for the save that is being written, and saves."""
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"--from {folder}: it has no metrics.jsonl; give the folder of a run, such as runs/NAME")
    lines, _ = read_metrics(folder / "metrics.jsonl")
    writes = [line.metrics["checkpoint/write_s"] for line in lines if "checkpoint/write_s" in line.metrics]
    if not writes:
        raise ConfigError(
            f"--from {folder}: no step has the metric checkpoint/write_s, so the time to save is unknown. Give a run "
            "that has trained on after a checkpoint: set loop.save_every_steps (for SFT, sft.save_every_steps)"
        )
    copies = [line.metrics.get("time/save_s", 0.0) for line in lines]
    # The longest step or evaluation: the sum of its phases. Those of an overlapped schedule overlap, so it is at most
    # the time since the previous line.
    phases = [sum(v for name, v in line.metrics.items() if re.fullmatch("time/.*_s", name)) for line in lines]
    gaps = [math.inf, *(later.time - line.time for line, later in pairwise(lines))]
    step_s, save_s = max(map(min, phases, gaps)), max(copies) + max(writes)
    lead_s = _MARGIN * (step_s + 2 * save_s) + _END_S
    if not lead_s <= _MAX_LEAD_S:
        raise ConfigError(
            f"--from {folder}: the run may need {lead_s:.0f} s to end, but the signal of sbatch can be at most "
            f"{_MAX_LEAD_S} s before the time limit; make the steps shorter"
        )
    return _Lead(
        math.ceil(lead_s),
        f"In {folder} the longest step or evaluation took {step_s:.1f} s, and the longest save {save_s:.1f} s: "
        f"{_MARGIN} x (step + 2 saves) + {_END_S} s.",
    )


def _check_time(limit: str | None, lead: _Lead) -> None:
    """Raises: ConfigError when the time limit is not longer than the lead, or is not one of sbatch."""
    if limit is None or limit.lower() in ("unlimited", "infinite", "0"):
        return
    days, dash, rest = limit.rpartition("-")
    numbers = rest.split(":")
    sizes = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    if len(numbers) > len(sizes) or not all(number.isdecimal() for number in (days or "0", *numbers)):
        raise ConfigError(
            f"--time {limit}: give minutes, MM:SS, HH:MM:SS, DAYS-HH, DAYS-HH:MM or DAYS-HH:MM:SS, such as 12:00:00"
        )
    limit_s = 86400 * int(days or 0) + sum(int(number) * size for number, size in zip(numbers, sizes))
    if limit_s <= lead.seconds:
        raise ConfigError(
            f"--time {limit} is {limit_s} s, but the run gets SIGTERM {lead.seconds} s before the time limit, to end "
            "with a checkpoint. Give a longer --time, or give --from the folder of a run of this config, so that the "
            "time to end is the measured one"
        )


def _comment(text: str) -> str:
    return textwrap.fill(
        text, 118, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
