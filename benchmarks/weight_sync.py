"""Weight sync: from the optimizer's fp32 masters into the samplers' bf16 tensors, against the bare transfer.

    python benchmarks/weight_sync.py

Weights of Qwen2-0.5B's shape, random, made on the spot (988 MB in bf16). 1 and 2 train ranks to 1 and 2 samplers, each
a process with its share of the cores, through the run's own groups and executor:

    beside_1, beside_2      1 and 2 ranks that train and sample (colocated)
    split_1_1 .. split_2_2  T train ranks, S samplers in processes of their own

In each: the bare transfer (`bare_sync.py` says what that is), our sync with the `wire` proof alone, with all proofs
that a sync has (wire and resident), and with all proofs where a share of the weights has changed and changes alone are
sent (delta). They take turns in one run. share_* is bare seconds over ours, so 1 is the speed of the bare transfer.

The change scan, which a delta's time is compared with, is what any exact delta has to do: cast each shard, compare it
with what was sent before, and search for the places that differ. Extra memory: the buffers that a sync fills, and how
far the resident size of all processes rises above what it was before a sync, at its peak.

One rank that trains and samples writes the sampler's tensors itself, and so sends no changes: beside_1 has no delta.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import bare_sync
import torch
from measure import Report, Timing, median, paired_ratio, parser

from meshrl.cluster.groups import sync_weights
from meshrl.cluster.launch import Groups, launched
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.sync.manifest import Ack, Layout
from meshrl.sync.send import merged

SHAPES = {
    "smoke": dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
    "0.5B": dict(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864
    ),
}
TOPOLOGIES = {  # name -> (train ranks, samplers in processes of their own)
    "beside_1": (1, 0),
    "beside_2": (2, 0),
    "split_1_1": (1, 1),
    "split_1_2": (1, 2),
    "split_2_1": (2, 1),
    "split_2_2": (2, 2),
}
CHANGED = 0.02
CONTENDERS = ("bare", "wire", "proven", "delta")


class Bench:
    """One topology: its groups, and each contender as a coroutine of seconds."""

    def __init__(self, groups: Groups, layout: Layout):
        assert groups.trainer is not None and groups.rollouts is not None
        self.trainer, self.rollouts, self.layout = groups.trainer, groups.rollouts, layout
        self.call = groups.executor.call
        self.train_ranks, self.samplers = range(self.trainer.num_ranks), self.rollouts.ranks
        self.split = self.samplers[0] not in self.train_ranks
        self.acks: list[Ack] = []

    async def everywhere(self, ranks: Any, method: Callable[..., Any], *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.call(rank, method, *args) for rank in ranks))

    @property
    def all_ranks(self) -> list[int]:
        return sorted({*self.train_ranks, *self.samplers})

    async def sync(self) -> float:
        """Ours; returns seconds."""
        return await _seconds(self._sync())

    async def _sync(self) -> None:
        self.acks = await sync_weights(self.trainer, self.rollouts, self.layout)

    async def bare(self) -> float:
        """The bare transfer; returns seconds."""
        if not self.split and self.trainer.num_ranks == 1:
            return max(await self.everywhere(self.train_ranks, bare_sync.beside_alone))
        names = await self.everywhere(self.train_ranks, bare_sync.open_ring, self.layout)
        await self.everywhere(self.samplers, bare_sync.open_views, names, self.layout)
        if self.split:
            took = await _seconds(self._bare_split())
        else:
            took = max(await self.everywhere(self.train_ranks, bare_sync.beside_each_other, self.layout))
        await self.everywhere(self.all_ranks, bare_sync.close_all)
        return took

    async def _bare_split(self) -> None:
        async for stream, index in merged([self._fills(rank) for rank in self.train_ranks]):
            await self.everywhere(self.samplers, bare_sync.place, self.layout, stream, index)

    async def _fills(self, rank: int) -> AsyncIterator[tuple[int, int]]:
        while (index := await self.call(rank, bare_sync.fill, self.layout)) is not None:
            yield rank, index


async def _seconds(work: Awaitable[Any]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work
    return loop.time() - began


async def measure(report: Report, name: str, bench: Bench, rounds: int) -> None:
    """All contenders in turn; then memory, and the delta's scan."""
    in_place = not bench.split and bench.trainer.num_ranks == 1
    contenders = CONTENDERS[:-1] if in_place else CONTENDERS
    took: dict[str, list[float]] = {who: [] for who in (*contenders, *(() if in_place else ("scan",)))}
    sent: dict[str, int] = {}
    stages: dict[str, dict[str, float]] = {}
    for i in range(-1, rounds):
        for who in contenders if i % 2 == 0 else contenders[::-1]:
            await bench.everywhere(bench.samplers, bare_sync.prove, who != "wire")
            await bench.everywhere(bench.train_ranks, bare_sync.remember, who == "delta")
            if who == "delta":
                await bench.everywhere(bench.train_ranks, bare_sync.forget)
                await bench.sync()
                await bench.everywhere(bench.train_ranks, bare_sync.change, CHANGED, i)
                scan = max(await bench.everywhere(bench.train_ranks, bare_sync.scan))
            seconds = await (bench.bare() if who == "bare" else bench.sync())
            if who == "delta":
                await bench.everywhere(bench.train_ranks, bare_sync.forget)  # the base, and the buffers
            if who != "bare":
                sent[who], stages[who] = bench.acks[0].num_bytes, bench.acks[0].seconds
                report.raw.setdefault(f"stages_{name}_{who}", []).append(stages[who])
            if i >= 0:
                took[who].append(seconds)
                if who == "delta":
                    took["scan"].append(scan)
    report.keep_timings(name, {who: [Timing(s, 0.0) for s in seconds] for who, seconds in took.items()})
    for who, seconds in took.items():
        report.figure(f"s_{who}_{name}", median(seconds))
    total = bench.layout.total_bytes
    report.figure(f"gb_per_s_proven_{name}", total / median(took["proven"]) / 1e9)
    shares = {
        who: report.figure(f"share_{who}_{name}", paired_ratio(took["bare"], took[who])) for who in ("proven", "wire")
    }
    report.bar(f"share_proven_{name}", shares["proven"], at_least=0.60)
    report.bar(f"share_wire_{name}", shares["wire"], at_least=0.80)
    if not in_place:
        _delta(report, name, took, sent)
    if not bench.split and bench.trainer.num_ranks > 1:
        report.figure(f"s_gathered_{name}", max(await bench.everywhere(bench.train_ranks, bare_sync.gathered)))
    report.say(f"{name}: stages of the last: " + ", ".join(f"{k} {v:.3f} s" for k, v in stages["proven"].items()))


def _delta(report: Report, name: str, took: dict[str, list[float]], sent: dict[str, int]) -> None:
    """Changes alone: against everything in bytes, against the search for them in time."""
    fewer = report.figure(f"delta_fewer_bytes_{name}", sent["proven"] / sent["delta"])
    report.bar(f"delta_fewer_bytes_{name}", fewer, at_least=10)
    over = report.figure(f"delta_over_scan_{name}", paired_ratio(took["delta"], took["scan"]))
    report.bar(f"delta_over_scan_{name}", over, at_most=1.5)


async def memory(report: Report, name: str, bench: Bench, bucket_bytes: int) -> None:
    """Buffers, and how far all processes together rise above what they held, in a sync after the first."""
    await bench.sync()
    before = await bench.everywhere(bench.all_ranks, bare_sync.watch_memory)
    await bench.sync()
    after = await bench.everywhere(bench.all_ranks, bare_sync.peak_memory)
    risen = sum(max(0, b - a) for a, b in zip(before, after, strict=True))
    extra = bench.acks[0].extra_bytes + risen
    report.figure(f"extra_bytes_{name}", extra)
    report.bar(f"extra_buckets_{name}", extra / bucket_bytes, at_most=2)


def model_folder(shape: str) -> Path:
    """Random weights in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.initialization import no_init_weights

    config = Qwen2Config(num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, **SHAPES[shape])
    with no_init_weights():
        lm = Qwen2ForCausalLM(config).bfloat16()
    lm.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in lm.parameters():
            p.normal_(std=0.02)
        for name, p in lm.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
    folder = Path(tempfile.mkdtemp(prefix=f"model-{shape}-"))
    lm.save_pretrained(folder)
    return folder


async def run(report: Report, args: Any) -> None:
    folder = args.model or model_folder("smoke" if args.smoke else "0.5B")
    bucket_bytes = 16 << 10 if args.smoke else args.bucket_mib << 20
    for name in args.only or TOPOLOGIES:
        num_train, num_rollout = TOPOLOGIES[name]
        # delta, so that ranks can be told to remember what they send; they do only where that is measured
        rollout = RolloutConfig(sync_bucket_bytes=bucket_bytes, sync_mode="delta")
        cluster = ClusterConfig(num_train_ranks=num_train, num_rollout_ranks=num_rollout, timeout_s=900.0)
        model, train = ModelConfig(path=str(folder), dtype="bfloat16"), TrainConfig(activation_checkpointing=False)
        async with launched(
            model, train, rollout, cluster, num_train_ranks=num_train, num_rollout_ranks=num_rollout
        ) as groups:
            assert groups.trainer is not None and groups.rollouts is not None
            layout = await groups.trainer.layout(bucket_bytes)
            await groups.rollouts.reconcile(layout)
            bench = Bench(groups, layout)
            report.raw[f"threads_{name}"] = await bench.everywhere(bench.all_ranks, bare_sync.num_threads)
            await bench.everywhere(bench.train_ranks, bare_sync.remember, False)
            await memory(report, name, bench, bucket_bytes)
            await measure(report, name, bench, args.rounds)


def main() -> None:
    p = parser(__doc__, rounds=7)
    p.add_argument("--only", nargs="+", choices=list(TOPOLOGIES), help="these topologies alone")
    p.add_argument("--bucket-mib", type=int, default=64, help="rollout.sync_bucket_bytes, in MiB (default 64)")
    args = p.parse_args()
    if args.smoke:
        args.rounds, args.only = 2, args.only or ["beside_1", "split_2_1"]
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import bare_sync by its name
    report = Report("weight_sync", args)
    asyncio.run(run(report, args))
    report.finish()


if __name__ == "__main__":
    main()
