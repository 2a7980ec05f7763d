"""The groups that FSDP2 gathers together: equal gradients, few collectives, and what is gathered at which time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from harness import STRATEGIES, check, engine_over, partitioned, random_partition, unsharded
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from torch import float64
from torch.distributed.tensor import DTensor

from meshrl.algo.losses import make_policy_loss, sft_loss
from meshrl.config.algo import AlgoConfig
from meshrl.monitor.recorder import recorder
from meshrl.train.packing import pack

LENGTHS = [12, 3, 40, -6, 7, 7, 21, 2, 12, 12]
EACH, ALL = 0, 1 << 25  # train.fsdp_group_bytes: embedding, head and each block by itself; one group of all blocks
MESHES = {"tp": {"mesh": {"tp": 2}}, "ulysses": {"mesh": {"ulysses": 2}}} | STRATEGIES


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_does_not_depend_on_the_groups(pool: Any, mesh: str, tie: bool):
    """Also with stored and with recomputed activations, a micro-batch without rows, and one without a gradient."""
    samples, loss = weigh(random_samples(1, LENGTHS)), make_policy_loss(AlgoConfig(entropy_coef=0.01))
    model = {"dtype": float64, "tie": tie, "num_hidden_layers": 3}
    want = unsharded(tiny_qwen2(**model), samples, loss)
    partition = random_partition(np.random.default_rng(0), len(samples), 2 if mesh in ("tp", "ulysses") else 4, 2)
    partition = [[*own, []] for own in partition]
    for size, checkpointing, prefetch in ((EACH, True, 2), (EACH, False, 1), (ALL, "selective", 1)):
        strategy = {"sharding_strategy": mesh} if mesh in STRATEGIES else {}
        groups = {"fsdp_group_bytes": size, "fsdp_prefetch": prefetch, "activation_checkpointing": checkpointing}
        train = groups | strategy | MESHES[mesh]
        check(pool.run(partitioned, 4, tiny_qwen2, model, samples, partition, loss, train), want, float64)


MEGABYTE = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=24)  # fp32 layers of a megabyte


def _collectives(rank: int, world: int, size: int) -> Counter[str]:
    engine = engine_over(tiny_qwen2(**MEGABYTE), world, {"fsdp_group_bytes": size})
    recorder.clear()
    engine.forward_backward([pack(weigh(random_samples(0, [9])), [0])], sft_loss)
    return Counter(span.name for span in recorder.trace(rank).spans if span.category == "collective")


def test_small_layers_share_their_collectives(pool: Any):
    each, few = (pool.run(_collectives, 2, size)[0] for size in (EACH, ALL))
    assert each == {"all_gather": 2 * 24 + 1, "reduce_scatter": 24 + 1}
    assert few == {"all_gather": 2 + 1, "reduce_scatter": 1 + 1} and few.total() <= each.total() / 4


def _ahead(rank: int, world: int, prefetch: int) -> tuple[list[int], list[int]]:
    """Blocks that are being gathered while each block computes, in the order of forward and of backward."""
    train = {"fsdp_group_bytes": EACH, "fsdp_prefetch": prefetch, "activation_checkpointing": False}
    engine = engine_over(tiny_qwen2(num_hidden_layers=5), world, train)
    groups = [block._get_fsdp_state()._fsdp_param_group for block in engine.model.layers]
    forward: list[int] = []
    backward: list[int] = []

    def count(into: list[int]) -> None:
        into.append(sum(group._all_gather_result is not None for group in groups))

    def ran(module: Any, args: Any, output: Any) -> None:
        count(forward)
        output.register_hook(lambda grad: count(backward))

    for block in engine.model.layers:
        block.mlp.register_forward_hook(ran)
    engine.forward_backward([pack(weigh(random_samples(0, [9])), [0])], sft_loss)
    return forward, backward


def test_blocks_are_gathered_ahead(pool: Any):
    assert pool.run(_ahead, 2, 1)[0] == ([0] * 5, [1, 1, 1, 1, 0])  # FSDP2's own: forwards, it is queued with the next
    assert pool.run(_ahead, 2, 3)[0] == ([3, 3, 2, 1, 0], [3, 3, 2, 1, 0])


def _gathered(rank: int, world: int, tie: bool) -> list[tuple[str, bool, bool]]:
    """(when, whether the embedding and the head are gathered)"""
    engine = engine_over(tiny_qwen2(tie=tie), world, {"fsdp_group_bytes": EACH})
    ends, seen = (engine.model.lm.get_input_embeddings(), engine.model.lm.get_output_embeddings()), []

    def look(when: str) -> None:
        embedding, head = (not isinstance(end.weight, DTensor) for end in ends)
        seen.append((when, embedding, head))

    def in_block(module: Any, args: Any, output: Any) -> None:
        look("forward of a block")
        if output.requires_grad:
            output.register_hook(lambda grad: look("backward of a block"))

    def loss(*args: Any) -> Any:
        look("loss")
        return sft_loss(*args)

    engine.model.layers[0].mlp.register_forward_hook(in_block)
    batches = [pack(weigh(random_samples(0, [9])), [0])]
    engine.forward_backward(batches, loss)
    look("end")
    engine.forward(batches)
    look("end")
    return seen


def test_embedding_and_head_are_gathered_for_their_own_use_alone(pool: Any):
    (seen, _) = pool.run(_gathered, 2, False)
    assert seen == [
        ("forward of a block", False, False),
        ("loss", False, True),  # its backward pass comes next
        ("backward of a block", False, False),
        ("end", False, False),
        ("forward of a block", False, False),
        ("end", False, False),
    ]
    (tied, _) = pool.run(_gathered, 2, True)
    assert [own[1:] for own in tied] == [(when != "end",) * 2 for when, *_ in tied]
