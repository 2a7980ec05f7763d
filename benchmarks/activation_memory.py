"""train.activation_checkpointing: bytes that blocks hold for their backward pass, and their FLOP, for each mode.

    python benchmarks/activation_memory.py

One row of 1,024 tokens through decoder blocks of the shape of Qwen2-0.5B, in float32 and in bfloat16, on a CPU. A
figure is that of one block: the difference between a model of two blocks and one of a single block.

    saved    1 - bytes over those of `false`. Bytes: of all tensors that were made in the forward pass and exist after
             it, so also those that selective checkpointing caches
    flop     FLOP of the matrix products of forward and backward pass over those of `false`
    cpu      the same ratio of CPU time, the median of rounds in which the modes take turns; of two blocks
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measure import Report, alternate, paired_ratio, parser
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from meshrl.model import attention
from meshrl.model.causal import CausalModel
from meshrl.parallel.checkpointing import checkpoint_blocks

SHAPE = dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, vocab_size=64)
SMOKE_SHAPE = dict(hidden_size=112, intermediate_size=608, num_attention_heads=14, num_key_value_heads=2, vocab_size=64)
TOKENS = 1024
MODES: dict[str, bool | str] = {"false": False, "true": True, "submodule": "submodule", "selective": "selective"}
SAVED = {"true": 0.90, "submodule": 0.65, "selective": 0.40}
FLOP = {"submodule": 1.20, "selective": 1.01}


class Held(TorchDispatchMode):
    """The storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known, made = (
            [t.untyped_storage() for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (args, out)
        )
        new = {storage._cdata: storage for storage in made}.items() - {
            storage._cdata: storage for storage in known
        }.items()
        self._made |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in new}
        return out

    def num_bytes(self) -> int:
        """Of those that still exist."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def blocks(depth: int, mode: bool | str, dtype: torch.dtype, shape: dict[str, int]) -> CausalModel:
    attention.register()
    config = Qwen2Config(**shape, num_hidden_layers=depth, max_position_embeddings=TOKENS)
    config._attn_implementation, config.use_cache = attention.NAME, False
    torch.manual_seed(0)
    model = CausalModel(Qwen2ForCausalLM(config).eval().to(dtype))
    checkpoint_blocks(model.blocks, mode)
    return model


def forward(model: CausalModel) -> torch.Tensor:
    tokens = torch.arange(TOKENS) % 64
    context = attention.PackedAttention([0, TOKENS], torch.device("cpu"))
    return model.hidden(tokens, torch.arange(TOKENS), context)


def step(model: CausalModel, i: int) -> None:
    forward(model).sum().backward()
    model.zero_grad(set_to_none=True)


def counted(depth: int, mode: bool | str, dtype: torch.dtype, shape: dict[str, int]) -> tuple[int, int]:
    """Bytes after the forward pass, and the FLOP of both passes."""
    model = blocks(depth, mode, dtype, shape)
    with FlopCounterMode(display=False) as flop:
        with Held() as held:
            out = forward(model)
        num_bytes = held.num_bytes()
        out.sum().backward()
    return num_bytes, flop.get_total_flops()


def main() -> None:
    p = parser(__doc__, rounds=3)
    args = p.parse_args()
    report, shape = Report("activation_memory", args), SMOKE_SHAPE if args.smoke else SHAPE
    torch.set_num_threads(args.threads)
    for dtype in (torch.float32, torch.bfloat16):
        name, found = str(dtype).removeprefix("torch."), dict[str, tuple[int, int]]()
        for mode, value in MODES.items():
            two, one = (counted(depth, value, dtype, shape) for depth in (2, 1))
            found[mode] = two[0] - one[0], two[1] - one[1]
        report.raw[f"bytes_and_flop_{name}"] = found
        work = {mode: partial(step, blocks(2, value, dtype, shape)) for mode, value in MODES.items()}
        took = alternate(work, 1 if args.smoke else args.rounds)
        report.add_timings(f"cpu_{name}", took)
        for mode in [mode for mode in MODES if mode != "false"]:
            saved, flop = 1 - found[mode][0] / found["false"][0], found[mode][1] / found["false"][1]
            report.figure(f"flop_{mode}_{name}", flop)
            cpu = [[timing.cpu_s for timing in took[which]] for which in (mode, "false")]
            report.figure(f"cpu_{mode}_{name}", paired_ratio(*cpu))
            report.bar(f"saved_{mode}_{name}", saved, at_least=SAVED[mode])
            if mode in FLOP:
                report.bar(f"flop_{mode}_{name}", flop, at_most=FLOP[mode])
    report.finish()


if __name__ == "__main__":
    main()
