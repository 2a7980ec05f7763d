"""The start of colocated ranks reads each byte of the model's tensors once, over all ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_engines import ask
from tiny_models import tiny_qwen2

from meshrl.cluster import actors
from meshrl.cluster.actors import RankWorker
from meshrl.cluster.executor import WorkerSpec
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.core.errors import StaleWeightsError
from meshrl.core.types import POLICY, REFERENCE
from meshrl.model import facts, stream
from meshrl.model.folder import KINDS, stored_tensors
from meshrl.parallel.fsdp import full_tensor
from meshrl.rollout.embedded.engine import EmbeddedEngine

DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
Reads = list[tuple[str, int, int]]  # file, first byte, end


def _spec(folder: Path, rank: int, num_train: int, num_rollout: int, **train: Any) -> WorkerSpec:
    return WorkerSpec(
        rank=rank,
        num_train_ranks=num_train,
        num_rollout_ranks=num_rollout,
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        train=TrainConfig(**train),
        rollout=RolloutConfig(),
        roles=(POLICY, REFERENCE),
        stop_token_ids=(),
        timeout_s=60.0,
    )


def _started(
    rank: int, world: int, folder: Path, first: int, num_train: int, num_rollout: int, train: dict[str, Any]
) -> tuple[Reads, list[str]]:
    """What a rank read, and the names of the tensors of its reference that differ from those of the files. first: the
    number of the first of these ranks."""
    reads: Reads = []
    original = stream._Reader._bytes

    def recorded(self: Any, part: Any, at: int, piece: torch.Tensor) -> None:
        reads.append((part.file.name, part.offset + at, part.offset + at + len(piece)))
        original(self, part, at, piece)

    def load_full(*args: Any) -> None:
        raise AssertionError("a rank loads the full model")

    worker = RankWorker(_spec(folder, first + rank, num_train, num_rollout, **train))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream._Reader, "_bytes", recorded)
        patch.setattr(facts, "_load_full", load_full)
        patch.setattr(actors, "_open_store", lambda spec: None)
        patch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)  # the pool has done it
        worker.start()
    torch.set_num_threads(1)
    if worker.sampler is not None:
        assert isinstance(worker.sampler, EmbeddedEngine)
        assert worker.sampler._weights._fast is not None  # random values are enough to accept the fast decoder
        with pytest.raises(StaleWeightsError, match="never had"):
            worker.trust_loaded_weights()
        with pytest.raises(StaleWeightsError, match="sync weights first"):
            asyncio.run(worker.sampler.generate(ask("early", [1, 2])))
    if not worker.engines:
        return reads, []
    want = tiny_qwen2(tie=False).to(torch.bfloat16).state_dict()
    got = {name: full_tensor(p.detach()) for name, p in worker.engines["reference"].model.lm.named_parameters()}
    return reads, [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize(
    ("num_train", "num_rollout", "train"),
    [
        (4, 0, {}),
        (4, 0, {"sharding_strategy": "NO_SHARD"}),
        (4, 0, {"mesh": {"tp": 2, "dp_shard": 2}}),
        (4, 0, {"mesh": {"ulysses": 2, "dp_shard": 2}}),
        (2, 0, {"master_dtype": "bfloat16"}),
        (2, 2, {}),
    ],
    ids=["sharded", "replicas", "tp", "ulysses", "bf16 masters", "separate samplers"],
)
def test_a_start_reads_each_byte_once(pool, tmp_path, num_train, num_rollout, train):
    """By policy, reference and sampler of all ranks together. The first sync brings the samplers' weights; before it
    they refuse to sample."""
    tiny_qwen2(tie=False).save_pretrained(tmp_path, max_shard_size="20KB")
    answers = pool.run(_started, num_train, tmp_path, 0, num_train, num_rollout, train)
    if num_rollout:
        answers += pool.run(_started, num_rollout, tmp_path, num_train, num_train, num_rollout, train)
    assert [wrong for _, wrong in answers] == [[]] * len(answers)
    counts: Counter[tuple[str, int]] = Counter()
    for file, first, end in (read for reads, _ in answers for read in reads):
        counts.update((file, byte) for byte in range(first, end))
    stored = stored_tensors(tmp_path)[0].values()
    assert len(counts) == sum(tensor.numel * DTYPES[tensor.kind].itemsize for tensor in stored)
    assert set(counts.values()) == {1}
