"""The DeviceMesh, dp_replicate x dp_shard x ulysses x tp, and its shape from the config."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute, debug

from meshrl.config.train import TrainMeshConfig
from meshrl.core.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "ulysses", "tp")


def resolve_shape(cfg: TrainMeshConfig, num_ranks: int, sharding_strategy: str) -> tuple[int, int, int, int]:
    """Sizes of the four axes for num_ranks ranks; -1 takes what remains. NO_SHARD turns all ranks into replicas.

    Raises: ConfigError when the axes don't multiply to num_ranks.
    """
    fixed = cfg.ulysses * cfg.tp
    if sharding_strategy == "NO_SHARD":
        shape = (num_ranks // fixed, 1, cfg.ulysses, cfg.tp)
    else:
        shard = num_ranks // (cfg.dp_replicate * fixed) if cfg.dp_shard == -1 else cfg.dp_shard
        shape = (cfg.dp_replicate, shard, cfg.ulysses, cfg.tp)
    size = shape[0] * shape[1] * shape[2] * shape[3]
    if size != num_ranks:
        raise ConfigError(
            f"train.mesh {dict(zip(AXES, shape, strict=True))} needs {size} ranks, but cluster.num_train_ranks is "
            f"{num_ranks}; make the product equal, or leave dp_shard at -1"
        )
    return shape


def num_peers(cfg: TrainMeshConfig) -> int:
    """The number of ranks that work on the same samples: they differ only in their ulysses and tp index."""
    return cfg.ulysses * cfg.tp


def data_index(cfg: TrainMeshConfig, rank: int) -> int:
    """Which samples a global rank works on: its index in dp_replicate x dp_shard."""
    return rank // num_peers(cfg)


def build_mesh(shape: tuple[int, int, int, int], device_type: str) -> DeviceMesh:
    """The named mesh over the default process group."""
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that FSDP2 shards over: 1-D, or (replicate, shard) when there are replicas."""
    if mesh["dp_replicate"].size() > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]


def forget_meshes() -> None:
    """Clear DTensor's caches: they keep meshes, and so process groups with their threads, alive. A fork from another
    thread would destroy these groups in the child, where the threads that they join don't exist, and the child would
    crash before its exec (Ray starts its servers by such forks).
    """
    plans = getattr(_redistribute, "_gen_transform_infos", None)
    private = (  # another torch may lack them
        (plans, "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (debug, "_clear_sharding_prop_cache"),
    )
    for owner, name in private:
        getattr(owner, name, lambda: None)()
