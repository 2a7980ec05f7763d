"""Weight sync: from the optimizer's fp32 masters into the samplers' bf16 tensors, against the bare transfer.

    python benchmarks/weight_sync.py

Weights of Qwen2-0.5B's shape, random, made on the spot (988 MB in bf16), through the run's own groups and executor.
Each rank is a process with its share of the cores:

    colocated_1                one rank that trains and samples, which writes its sampler's tensors in place
    colocated_2                two such ranks, over shared memory
    sockets_2_1                two train ranks and a sampler of its own on the same machine: shared memory and sockets
    broadcast_2_1              the same by rollout.sync_transport broadcast
    other_machine_2_1          the same over TCP, as if each rank were on a machine of its own

In each: three bare transfers (`bare_sync.py` describes them), our sync with the `wire` proof alone, with all proofs
that a sync has (wire and resident), and with all proofs where a share of the weights has changed and changes alone are
sent (delta). They take turns in one run. share_* is the seconds of the fastest bare transfer of a round over ours, so 1
is its speed. Other work on the machine makes shares meaningless: each topology waits for a load average of at most 0.5,
and after --quiet-s seconds its shares are "not measured".

The change scan, which a delta's time is compared with, is what any exact delta has to do: cast each shard, compare it
with what was sent before, and search for the places that differ. Extra memory: the buffers that a sync fills, and how
far the resident size of all processes rises above what it was before a sync, at its peak.

One rank that trains and samples writes everything, so colocated_1 has no delta.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare_sync
import torch
from measure import Ratio, Report, Timing, median, paired_ratio, parser

from meshrl.cluster.groups import sync_weights
from meshrl.cluster.launch import Groups, launched
from meshrl.config.cluster import ClusterConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.sync.layout import Ack, Layout

SHAPES = {
    "smoke": dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
    "0.5B": dict(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864
    ),
}
TOPOLOGIES: dict[str, tuple[int, int, str]] = {  # name -> (train ranks, samplers of their own, transport)
    "colocated_1": (1, 0, "auto"),
    "colocated_2": (2, 0, "auto"),
    "sockets_2_1": (2, 1, "auto"),
    "broadcast_2_1": (2, 1, "broadcast"),
    "other_machine_2_1": (2, 1, "auto"),
}
CHANGED = 0.02
MAX_LOAD = 0.5
CONTENDERS = (*bare_sync.BARE, "wire", "proven", "delta")


class Bench:
    """One topology: its groups, and each contender as a coroutine of seconds."""

    def __init__(self, groups: Groups, layout: Layout):
        assert groups.trainer is not None and groups.rollouts is not None
        self.trainer, self.rollouts, self.layout = groups.trainer, groups.rollouts, layout
        self.call = groups.executor.call
        self.train_ranks, self.samplers = range(self.trainer.num_ranks), self.rollouts.ranks
        self.in_place = self.samplers[0] in self.train_ranks and self.trainer.num_ranks == 1
        self.acks: list[Ack] = []

    async def everywhere(self, ranks: Any, method: Callable[..., Any], *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.call(rank, method, *args) for rank in ranks))

    @property
    def all_ranks(self) -> list[int]:
        return sorted({*self.train_ranks, *self.samplers})

    async def sync(self, contender: str = "proven") -> float:
        """As this contender does it; returns seconds."""
        if self.in_place and contender.startswith("copy"):
            return max(await self.everywhere(self.train_ranks, bare_sync.copy_in_place, contender))
        await self.everywhere(self.all_ranks, bare_sync.choose, contender)
        began = time.perf_counter()
        self.acks = await sync_weights(self.trainer, self.rollouts, self.layout)
        return time.perf_counter() - began

    async def remember(self, wanted: bool) -> None:
        await self.everywhere(self.train_ranks, bare_sync.remember, wanted)


async def quiet(limit_s: float) -> bool:
    """Whether the machine does nothing else; waits for so long until it does not."""
    end = time.monotonic() + limit_s
    while os.getloadavg()[0] > MAX_LOAD:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(5)
    return True


async def measure(report: Report, name: str, bench: Bench, args: Any) -> None:
    """All contenders in turn."""
    contenders = CONTENDERS[:-1] if bench.in_place else CONTENDERS
    took: dict[str, list[float]] = {who: [] for who in (*contenders, *(() if bench.in_place else ("scan",)))}
    sent: dict[str, int] = {}
    is_quiet = await quiet(0.0 if args.smoke else args.quiet_s)
    report.raw[f"load_average_{name}"] = os.getloadavg()[0]
    for i in range(-1, args.rounds):
        for who in contenders if i % 2 == 0 else contenders[::-1]:
            await bench.remember(who == "delta")
            if who == "delta":
                await bench.sync()
                await bench.everywhere(bench.train_ranks, bare_sync.change, CHANGED, i)
                scan = max(await bench.everywhere(bench.train_ranks, bare_sync.scan))
            seconds = await bench.sync("proven" if who == "delta" else who)
            if who not in bare_sync.BARE:
                sent[who] = bench.acks[0].num_bytes
                report.raw.setdefault(f"stages_{name}_{who}", []).append(bench.acks[0].seconds)
            if i >= 0:
                took[who].append(seconds)
                if who == "delta":
                    took["scan"].append(scan)
    report.keep_timings(name, {who: [Timing(s, 0.0) for s in seconds] for who, seconds in took.items()})
    for who, seconds in took.items():
        report.figure(f"s_{who}_{name}", median(seconds))
    report.figure(f"gb_per_s_proven_{name}", bench.layout.num_bytes / median(took["proven"]) / 1e9)
    fastest = list(map(min, *(took[who] for who in bare_sync.BARE)))
    for who, least in (("proven", 0.60), ("wire", 0.80)):
        share(report, f"share_{who}_{name}", paired_ratio(fastest, took[who]), is_quiet, at_least=least)
    if not bench.in_place:
        report.figure(f"delta_fewer_bytes_{name}", fewer := sent["proven"] / sent["delta"])
        report.bar(f"delta_fewer_bytes_{name}", fewer, at_least=10)
        share(report, f"delta_over_scan_{name}", paired_ratio(took["delta"], took["scan"]), is_quiet, at_most=1.5)
    if bench.trainer.num_ranks > 1 and bench.samplers[0] in bench.train_ranks:
        report.figure(f"s_gathered_{name}", max(await bench.everywhere(bench.train_ranks, bare_sync.gathered)))
    stages = report.raw[f"stages_{name}_proven"][-1]
    report.say(f"{name}: stages of the last: " + ", ".join(f"{stage} {s:.3f} s" for stage, s in stages.items()))


def share(report: Report, name: str, found: Ratio, is_quiet: bool, **bar: float) -> None:
    """A figure and its bar, if nothing else used the machine."""
    if is_quiet:
        report.bar(name, report.figure(name, found), **bar)
    else:
        report.not_measured(name, f"a load average above {MAX_LOAD}", **bar)


async def memory(report: Report, name: str, bench: Bench, bucket_bytes: int) -> None:
    """Buffers, and how far all processes together rise above what they held, in a sync after the first."""
    await bench.sync()
    await bench.remember(False)
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
        num_train, num_rollout, transport = TOPOLOGIES[name]
        rollout = RolloutConfig(sync_bucket_bytes=bucket_bytes, sync_mode="delta", sync_transport=transport)
        cluster = ClusterConfig(num_train_ranks=num_train, num_rollout_ranks=num_rollout, timeout_s=900.0)
        model, train = ModelConfig(path=str(folder), dtype="bfloat16"), TrainConfig(activation_checkpointing=False)
        async with launched(
            model, train, rollout, cluster, num_train_ranks=num_train, num_rollout_ranks=num_rollout
        ) as groups:
            assert groups.trainer is not None and groups.rollouts is not None
            layout = await groups.trainer.layout(bucket_bytes)
            bench = Bench(groups, layout)
            if name.startswith("other_machine"):
                await bench.everywhere(bench.all_ranks, bare_sync.apart)
            await groups.rollouts.reconcile(layout)
            report.raw[f"threads_{name}"] = await bench.everywhere(bench.all_ranks, bare_sync.num_threads)
            await memory(report, name, bench, bucket_bytes)
            await measure(report, name, bench, args)


def main() -> None:
    p = parser(__doc__, rounds=7)
    p.add_argument("--only", nargs="+", choices=list(TOPOLOGIES), help="these topologies alone")
    p.add_argument("--bucket-mib", type=int, default=64, help="rollout.sync_bucket_bytes, in MiB (default 64)")
    p.add_argument("--quiet-s", type=float, default=600.0, help="wait so long for the load to fall (default 600)")
    args = p.parse_args()
    if args.smoke:
        args.rounds, args.only = 2, args.only or ["colocated_1", "sockets_2_1"]
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import bare_sync by its name
    report = Report("weight_sync", args)
    asyncio.run(run(report, args))
    report.finish()


if __name__ == "__main__":
    main()
