"""Weight sync: from the optimizer's fp32 masters into the samplers' bf16 tensors, against the bare transfer.

    python benchmarks/weight_sync.py

The weights are those of --model, or random ones with Qwen2-0.5B's shape (988 MB in bf16); groups and executor are
those of a run. Each rank is a process with its share of the cores:

    colocated_1                one rank that trains and samples; it writes its sampler's tensors in place
    colocated_2                two such ranks, over shared memory
    sockets_2_1                two train ranks and a separate sampler on the same machine: shared memory and sockets
    broadcast_2_1              the same with rollout.sync_transport broadcast
    other_machine_2_1          the same over TCP, as if each rank were on a separate machine

The contenders are three bare transfers (see `bare_sync.py`); meshrl's sync with the `wire` proof only; with all proofs
of a sync (wire and read-back); and with all proofs when a share of the weights has changed and only changes are sent
(delta). They take turns in one run. share_*: seconds of the round's fastest bare transfer over seconds of the sync, so
1 is the speed of the bare transfer. Other work on the machine makes shares meaningless: each topology waits for a load
average of at most 0.5, and after --quiet-s seconds its shares are "not measured".

The time of a delta is compared with the search for changes, which any exact delta must do: cast each shard, compare it
with the weights that were sent before, and find the places that differ. Extra memory: the buffers of a sync, plus the
peak increase of the resident size of all processes during a sync.

A run reports the share of its weights that change as sync/changed_elements; give it as --changed. One rank that trains
and samples writes everything, so colocated_1 has no delta.
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

from meshrl.cluster.launch import Groups, launched
from meshrl.cluster.weight_sync import sync_weights
from meshrl.config.cluster import ClusterConfig
from meshrl.config.data import DataConfig
from meshrl.config.loop import LoopConfig
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.run import RunConfig
from meshrl.config.train import TrainConfig
from meshrl.sync.layout import Ack, Layout

SHAPES = {
    "smoke": dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
    "0.5B": dict(
        vocab_size=151936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864
    ),
}
TOPOLOGIES: dict[str, tuple[int, int, str]] = {  # name -> (train ranks, separate samplers, transport)
    "colocated_1": (1, 0, "auto"),
    "colocated_2": (2, 0, "auto"),
    "sockets_2_1": (2, 1, "auto"),
    "broadcast_2_1": (2, 1, "broadcast"),
    "other_machine_2_1": (2, 1, "auto"),
}
MAX_LOAD = 0.5
CONTENDERS = (*bare_sync.BARE, "wire", "proven", "delta")


class Bench:
    """One topology: its groups, and coroutines that run a contender and return seconds."""

    def __init__(self, groups: Groups, layout: Layout):
        assert groups.trainer is not None and groups.rollouts is not None
        self.trainer, self.rollouts, self.layout = groups.trainer, groups.rollouts, layout
        self.call = groups.executor.call
        self.train_ranks, self.samplers = range(self.trainer.num_ranks), self.rollouts.routes.ranks
        self.in_place = self.samplers[0] in self.train_ranks and self.trainer.num_ranks == 1
        self.acks: list[Ack] = []

    async def everywhere(self, ranks: Any, method: Callable[..., Any], *args: Any) -> list[Any]:
        return await asyncio.gather(*(self.call(rank, method, *args) for rank in ranks))

    @property
    def all_ranks(self) -> list[int]:
        return sorted({*self.train_ranks, *self.samplers})

    async def sync(self, contender: str = "proven") -> float:
        """A sync by this contender. Returns seconds."""
        if self.in_place and contender.startswith("copy"):
            return max(await self.everywhere(self.train_ranks, bare_sync.copy_in_place, contender))
        await self.everywhere(self.all_ranks, bare_sync.choose, contender)
        began = time.perf_counter()
        self.acks = await sync_weights(self.trainer, self.rollouts, self.layout)
        return time.perf_counter() - began

    async def set_keep_base(self, keep_base: bool) -> None:
        await self.everywhere(self.train_ranks, bare_sync.set_keep_base, keep_base)


async def wait_until_idle(limit_s: float) -> bool:
    """Wait up to limit_s seconds until the machine does no other work. Returns whether it is idle."""
    end = time.monotonic() + limit_s
    while os.getloadavg()[0] > MAX_LOAD:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(5)
    return True


async def measure(report: Report, name: str, bench: Bench, args: Any) -> None:
    """Measure all contenders in turn."""
    contenders = CONTENDERS[:-1] if bench.in_place else CONTENDERS
    took: dict[str, list[float]] = {each: [] for each in (*contenders, *(() if bench.in_place else ("scan",)))}
    sent: dict[str, int] = {}
    is_idle = await wait_until_idle(0.0 if args.smoke else args.quiet_s)
    report.raw[f"load_average_{name}"] = os.getloadavg()[0]
    for i in range(-1, args.rounds):
        for contender in contenders if i % 2 == 0 else contenders[::-1]:
            await bench.set_keep_base(contender == "delta")
            if contender == "delta":
                await bench.sync()
                await bench.everywhere(bench.train_ranks, bare_sync.change_weights, args.changed, i)
                scan = max(await bench.everywhere(bench.train_ranks, bare_sync.find_changes))
            seconds = await bench.sync("proven" if contender == "delta" else contender)
            if contender not in bare_sync.BARE:
                sent[contender] = bench.acks[0].num_bytes
                report.raw.setdefault(f"stages_{name}_{contender}", []).append(bench.acks[0].seconds)
            if i >= 0:
                took[contender].append(seconds)
                if contender == "delta":
                    took["scan"].append(scan)
    report.add_timings(name, {each: [Timing(s, 0.0) for s in seconds] for each, seconds in took.items()})
    for contender, seconds in took.items():
        report.figure(f"s_{contender}_{name}", median(seconds))
    report.figure(f"gb_per_s_proven_{name}", bench.layout.num_bytes / median(took["proven"]) / 1e9)
    fastest = list(map(min, *(took[bare] for bare in bare_sync.BARE)))
    for contender, least in (("proven", 0.60), ("wire", 0.80)):
        share(report, f"share_{contender}_{name}", paired_ratio(fastest, took[contender]), is_idle, at_least=least)
    if not bench.in_place:
        report.figure(f"delta_fewer_bytes_{name}", fewer := sent["proven"] / sent["delta"])
        report.bar(f"delta_fewer_bytes_{name}", fewer, at_least=10)
        share(report, f"delta_over_scan_{name}", paired_ratio(took["delta"], took["scan"]), is_idle, at_most=1.5)
    if bench.trainer.num_ranks > 1 and bench.samplers[0] in bench.train_ranks:
        gathered = await bench.everywhere(bench.train_ranks, bare_sync.sync_by_all_gather)
        report.figure(f"s_gathered_{name}", max(gathered))
    stages = report.raw[f"stages_{name}_proven"][-1]
    seconds_of_stages = ", ".join(f"{stage} {s:.3f} s" for stage, s in stages.items())
    report.print_line(f"{name}: stages of the last sync: {seconds_of_stages}")


def share(report: Report, name: str, found: Ratio, is_idle: bool, **bar: float) -> None:
    """Report a figure and its bar, if nothing else used the machine."""
    if is_idle:
        report.bar(name, report.figure(name, found), **bar)
    else:
        report.not_measured(name, f"a load average above {MAX_LOAD}", **bar)


async def memory(report: Report, name: str, bench: Bench, bucket_bytes: int) -> None:
    """Measure the buffers, and the increase of the resident size of all processes, in a sync after the first."""
    await bench.sync()
    await bench.set_keep_base(False)
    await bench.sync()
    before = await bench.everywhere(bench.all_ranks, bare_sync.reset_peak_memory)
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
        cfg = RunConfig(
            model=ModelConfig(path=str(folder), dtype="bfloat16"),
            train=TrainConfig(activation_checkpointing=False),
            rollout=rollout,
            data=DataConfig(),
            loop=LoopConfig(num_steps=1),
            cluster=ClusterConfig(num_train_ranks=num_train, num_rollout_ranks=num_rollout, timeout_s=900.0),
        )
        async with launched(cfg, num_train, num_rollout) as groups:
            assert groups.trainer is not None and groups.rollouts is not None
            layout = await groups.trainer.layout(bucket_bytes)
            bench = Bench(groups, layout)
            if name.startswith("other_machine"):
                await bench.everywhere(bench.all_ranks, bare_sync.act_as_machine)
            await groups.rollouts.reconcile(layout)
            report.raw[f"threads_{name}"] = await bench.everywhere(bench.all_ranks, bare_sync.num_threads)
            await memory(report, name, bench, bucket_bytes)
            await measure(report, name, bench, args)


def main() -> None:
    p = parser(__doc__, rounds=7)
    p.add_argument("--only", nargs="+", choices=list(TOPOLOGIES), help="only these topologies")
    p.add_argument("--changed", type=float, default=0.02, help="share of the weights that change for a delta (0.02)")
    p.add_argument("--bucket-mib", type=int, default=64, help="rollout.sync_bucket_bytes, in MiB (default 64)")
    p.add_argument("--quiet-s", type=float, default=600.0, help="longest wait for an idle machine (default 600)")
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
