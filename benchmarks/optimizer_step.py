"""The optimizer step of the engine, which computes with each rank's shards, and of PyTorch's AdamW over DTensors.

    python benchmarks/optimizer_step.py

Four ranks with gloo, of one thread each, for a Qwen2 of 28 layers that is so narrow that its arithmetic takes no time;
its 338 tensors are those of Qwen2.5-1.5B. Both contenders clip the same gradients and step; each round has new
processes, because PyTorch remembers the placements that it has planned.

first_MESH, later_MESH: CPU time of PyTorch's first step, and of the median of ten later ones, over that of the engine,
of the slowest rank, median over rounds. first_s_MESH_CONTENDER: seconds of the first one.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Report, median, paired_ratio, parser
from transformers import Qwen2Config, Qwen2ForCausalLM
from workload import VOCAB, micro_batches

from meshrl.algo.losses import make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.config.train import TrainConfig
from meshrl.core.types import POLICY
from meshrl.parallel.mesh import build_mesh
from meshrl.train.engine import TrainEngine

WORLD, LATER, LR, CLIP = 4, 10, 1e-5, 1e-3
MESHES = {"dp_shard": (1, 4, 1, 1), "dp_shard_tp": (1, 2, 1, 2)}
CONTENDERS = ("engine", "dtensors")


def main() -> None:
    args = parser(__doc__, rounds=3).parse_args()
    report = Report("optimizer_step", args)
    for name in MESHES:
        took: dict[str, list[list[float]]] = {contender: [] for contender in CONTENDERS}
        for i in range(1 if args.smoke else args.rounds):
            for contender in CONTENDERS if i % 2 == 0 else CONTENDERS[::-1]:
                took[contender].append(_steps_of(name, contender, args.smoke))
        report.raw[name] = took
        for which, part in (("first", slice(1)), ("later", slice(1, None))):
            seconds = {contender: [median(steps[part]) for steps in rounds] for contender, rounds in took.items()}
            ratio = paired_ratio(seconds["dtensors"], seconds["engine"])
            report.bar(f"{which}_{name}", report.figure(f"{which}_{name}", ratio), at_least=1)
        for contender in CONTENDERS:
            report.figure(f"first_s_{name}_{contender}", median([steps[0] for steps in took[contender]]))
    report.finish()


def _steps_of(name: str, contender: str, smoke: bool) -> list[float]:
    """CPU seconds of each step in the slowest rank of new processes."""
    with tempfile.TemporaryDirectory(prefix="optimizer-") as folder:
        torch.multiprocessing.spawn(_rank_main, (name, contender, smoke, Path(folder)), nprocs=WORLD)
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return [max(steps) for steps in zip(*ranks, strict=True)]


def _rank_main(rank: int, name: str, contender: str, smoke: bool, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), WORLD), rank=rank, world_size=WORLD)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(
        Qwen2Config(num_hidden_layers=2 if smoke else 28, vocab_size=VOCAB, tie_word_embeddings=True, **size)
    )
    cfg = TrainConfig(optimizer={"clip": CLIP})
    engine = TrainEngine.wrap(lm, cfg, build_mesh(MESHES[name], "cpu"), POLICY, torch.float32)
    samples, _ = micro_batches(0, True, 1)
    batches = [engine.pack([sample], [i]) for i, sample in enumerate(samples[:1])]
    parameters = list(engine.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=cfg.optimizer.betas, fused=True)
    took = []
    for _ in range(1 + LATER):
        engine.forward_backward(batches, make_policy_loss(AlgoConfig()))
        began = time.process_time()
        if contender == "engine":
            engine.optim_step(LR)
        else:
            _step(parameters, optimizer)
        took.append(time.process_time() - began)
        dist.barrier()
    (out / f"{rank}.json").write_text(json.dumps(took))
    dist.destroy_process_group()


def _step(parameters: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """As PyTorch's documentation of FSDP2 does it."""
    float(torch.nn.utils.clip_grad_norm_(parameters, CLIP).full_tensor())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
