"""Compares the ranks that a run starts on this machine with its devices and CPU cores, before anything is started."""

from __future__ import annotations

import os

from meshrl.cluster.torchrun import is_launched
from meshrl.config.cluster import ClusterConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.core.device import device_count, device_type, may_have_own_device, num_cores
from meshrl.core.errors import ConfigError


def check_devices(
    cluster: ClusterConfig, rollout: RolloutConfig | None, num_train_ranks: int, num_rollout_ranks: int
) -> str | None:
    """Returns a note when ranks on the CPU share cores. Under Ray there is nothing to check: it reserves a device for
    each rank. Under torchrun every process calls this, for its own machine.

    Raises: ConfigError when ranks would share a device, which NCCL does not support.
    """
    if cluster.executor == "ray":
        return None
    num_ranks = num_train_ranks + num_rollout_ranks
    local = _launched_ranks(num_ranks) if is_launched() else range(num_ranks)
    kind = device_type()
    if kind == "cpu":
        cores = num_cores()
        if is_launched() or num_ranks <= cores:  # torchrun's processes may each have their own cores
            return None
        keys = "cluster.num_train_ranks + cluster.num_rollout_ranks"
        return f"{num_ranks} ranks ({keys}) share the {cores} CPU cores of this machine, so each waits for the others"
    users = [rank for rank in local if rank < num_train_ranks or _samples_on_device(rollout)]
    devices = device_count()
    if len(users) <= devices or (is_launched() and may_have_own_device()):
        return None
    needing = "1 rank of this machine needs" if len(users) == 1 else f"{len(users)} ranks of this machine need"
    if num_train_ranks:
        asked = f"cluster.num_train_ranks = {num_train_ranks}, cluster.num_rollout_ranks = {num_rollout_ranks}"
    else:
        key = "num_rollout_ranks" if cluster.num_rollout_ranks else "num_train_ranks"
        asked = f"cluster.{key} = {num_rollout_ranks}, which all sample in an evaluation"
    fewer = f"Use at most {devices} (train ranks sample, too, if num_rollout_ranks is 0), or " if devices else ""
    raise ConfigError(
        f"{needing} a device each ({asked}), but the run sees {devices} device{'' if devices == 1 else 's'} of type "
        f"{kind}. {fewer}{'set' if fewer else 'Set'} MESHRL_DEVICE=cpu to run on the CPU"
    )


def _launched_ranks(num_ranks: int) -> range:
    """The ranks whose processes torchrun has started on this machine."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    first = int(os.environ["RANK"]) // num_local * num_local
    return range(first, min(first + num_local, num_ranks))


def _samples_on_device(rollout: RolloutConfig | None) -> bool:
    """Whether a rank that only samples uses a device: for its engine, or for a process group of NCCL."""
    if rollout is None or rollout.sync_transport == "broadcast":
        return True
    return rollout.engine != "endpoint" and (rollout.engine != "sglang" or rollout.sglang.url is None)
