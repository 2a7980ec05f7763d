"""What a start loads: the host memory of an embedded engine, and the bytes that colocated ranks read.

    python benchmarks/loading.py        # 5 min, Linux

alone       a rank of `meshrl eval`, whose embedded engine reads the folder
synced      a rank that only samples in a training run: the first sync brings the weights
colocated   train ranks with a reference model, which also sample (8 by default, of a smaller model)

peak_NAME   growth of the process at its peak while it builds its embedded engine, over the weights' bytes in the
            compute dtype (bfloat16) plus one transfer (64 MiB): the weights alone are about 0.94
read_NAME   bytes that all ranks read of the weight files, over the bytes of the weights there; headers are left out
"""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from measure import Report, parser
from workload import model_folder

from meshrl.cluster import actors
from meshrl.cluster.executor import WorkerSpec
from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig
from meshrl.config.train import TrainConfig
from meshrl.model import stream
from meshrl.model.folder import stored_tensors

HALF_B: dict[str, Any] = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
HALF_B |= dict(num_attention_heads=14, num_key_value_heads=2)
SMOKE: dict[str, Any] = dict(vocab_size=20_000, hidden_size=512, intermediate_size=512, num_hidden_layers=2)
SMOKE |= dict(num_attention_heads=8, num_key_value_heads=2)


@dataclass(frozen=True, slots=True)
class Loaded:
    """growth: of the process while it built its engine, at its peak. weights: bytes of the engine's parameters. read:
    bytes of the weight files."""

    growth: int
    weights: int
    read: int


def memory_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def start_rank(index: int, specs: list[WorkerSpec], threads: int, answers: Any) -> None:
    """Start a rank and put what it loaded. Its peak of memory is reset before it builds the engine."""
    torch.set_num_threads(threads)
    read, growth, original, build = 0, 0, stream._Reader._bytes, actors.build_rollout_engine

    def counted(self: Any, part: Any, first: int, piece: torch.Tensor) -> None:
        nonlocal read
        read += len(piece)
        original(self, part, first, piece)

    def measured(*args: Any, **kwargs: Any) -> Any:
        nonlocal growth
        ctypes.CDLL(None).malloc_trim(0)  # else the engine reuses memory that was freed before
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_bytes("VmRSS")
        engine = build(*args, **kwargs)
        growth = memory_bytes("VmHWM") - before
        return engine

    actors.build_rollout_engine = measured
    if not specs[index].trains:  # train ranks have imported all modules when they build the engine
        warm_up = ModelConfig(path=str(model_folder(None, "smoke")))
        build(warm_up, RolloutConfig(), torch.device("cpu"), 0, ())
    stream._Reader._bytes = counted  # type: ignore[method-assign]
    worker = actors.RankWorker(specs[index])
    worker.start()
    sampler: Any = worker.sampler
    answers.put(Loaded(growth, sum(p.nbytes for p in sampler._runner.model.parameters()), read))
    if specs[index].trains:
        torch.distributed.barrier()


def start_ranks(folder: Path, num_train: int, num_rollout: int, threads: int) -> list[Loaded]:
    """Of the ranks that sample. Train ranks are started only if they sample: the others would read files, too."""
    facts: dict[str, Any] = dict(num_train_ranks=num_train, num_rollout_ranks=num_rollout, stop_token_ids=())
    facts |= dict(model=ModelConfig(path=str(folder)), train=TrainConfig(), rollout=RolloutConfig())
    first = num_train if num_rollout else 0
    with tempfile.TemporaryDirectory() as store:
        facts |= dict(reference=True, timeout_s=600.0, rendezvous=str(Path(store) / "store"))
        specs = [WorkerSpec(rank=rank, **facts) for rank in range(first, num_train + num_rollout)]
        answers = mp.get_context("spawn").SimpleQueue()
        ranks = mp.spawn(start_rank, (specs, threads, answers), len(specs), join=False)
        while not ranks.join():  # it raises the error of a rank that failed
            pass
        return [answers.get() for _ in specs]


def write_model(shape: dict[str, Any]) -> Path:
    """A folder of a tied Qwen2 in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **shape)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    p = parser(__doc__, rounds=1)
    p.add_argument("--ranks", type=int, default=8, help="colocated ranks (default 8)")
    args = p.parse_args()
    report = Report("loading", args)
    folder = args.model or write_model(SMOKE if args.smoke else HALF_B)
    colocated = model_folder(args.model, "smoke" if args.smoke else "54M")
    cases = {
        "alone": (folder, 0, 1),
        "synced": (folder, 1, 1),
        "colocated": (colocated, 2 if args.smoke else args.ranks, 0),
    }
    for name, (path, num_train, num_rollout) in cases.items():
        ranks = start_ranks(path, num_train, num_rollout, args.threads)
        report.raw[name] = [[rank.growth, rank.weights, rank.read] for rank in ranks]
        sizes = [tensor.numel * stream.DTYPES[tensor.kind].itemsize for tensor in stored_tensors(path)[0].values()]
        peak = max(rank.growth / (rank.weights + stream.BUCKET_BYTES) for rank in ranks)
        report.figure(f"peak_{name}", peak)
        if path == folder:  # in a small model, what is no weight counts more
            report.bar(f"peak_{name}", peak, at_most=1.05)
        read = report.figure(f"read_{name}", sum(rank.read for rank in ranks) / sum(sizes))
        report.bar(f"read_{name}", read, at_most=0.0 if name == "synced" else 1.0)
    report.finish()


if __name__ == "__main__":
    main()
