"""`train.optimizer_offload`: the optimizer step in pieces, on a CPU that counts as a device."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import LORA, engine_over
from live_storages import LiveStorages
from test_checkpoint_reshard import save
from tiny_models import tiny_mixture, tiny_qwen2
from tiny_samples import random_samples, weigh
from torch.utils._python_dispatch import _disable_current_modes

from meshrl.algo.losses import sft_loss
from meshrl.model.lora import add_adapters, randomize_adapters
from meshrl.parallel.fsdp import local_shard
from meshrl.train import engine as engine_file
from meshrl.train import optim
from meshrl.train.checkpoint_files import state_folder
from meshrl.train.engine import TrainEngine
from meshrl.train.offload import zeros_of
from meshrl.train.state import state_tensors

UNDIVIDED = 0  # moments that stay on the device
PIECE = 4096  # bytes: 512 elements, less than most of the tensors
UNEVEN = {"hidden_size": 40, "intermediate_size": 50, "vocab_size": 61}  # ranks get different numbers of rows


def model_of(name: str) -> torch.nn.Module:
    if name == "mixture":
        return tiny_mixture(vocab_size=61)
    sizes = UNEVEN | {"hidden_size": 72} if name == "wide" else UNEVEN
    lm = tiny_qwen2(tie=name != "untied", dtype=torch.bfloat16 if name == "bf16 masters" else torch.float32, **sizes)
    if name == "LoRA":
        add_adapters(lm, LORA, torch.float32, "tiny")
        randomize_adapters(lm)
    return lm


@contextmanager
def engine_with(piece: int, name: str, world: int, train: dict[str, Any]) -> Iterator[TrainEngine]:
    with patch.object(engine_file, "has_own_memory", lambda device: True), patch.object(optim, "PIECE_BYTES", piece):
        yield engine_over(model_of(name), world, {"optimizer_offload": piece > 0, "optimizer": {"clip": 0.1}, **train})


def backward(engine: TrainEngine, seed: int) -> None:
    samples, at = weigh(random_samples(seed, [12, 3, 40, 7, 7, 21, 2, 30], vocab=60)), engine.coordinates
    rows = list(range(len(samples)))[at.data_index :: at.num_data]
    engine.forward_backward([engine.pack([samples[i] for i in rows], rows)], sft_loss)


def values(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """This rank's shards of what a checkpoint holds."""
    state = state_tensors(engine.model.lm, engine.optimizer, (engine.num_optimizer_steps, 0), engine.device)
    return {name: local_shard(t).clone() for name, t in state.items() if not name.startswith(("rng.", "gradient."))}


def trained(rank: int, world: int, piece: int, name: str, train: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Three steps: in the first one parameter has no gradient, the second one is skipped, the third one clips."""
    with engine_with(piece, name, world, train) as engine:
        for step in range(3):
            backward(engine, step)
            params = [p for p in engine.model.parameters() if p.grad is not None]
            if step == 0:
                params[-1].grad = None
            if step == 1:
                local_shard(params[0].grad).fill_(torch.inf)
            before = values(engine)
            assert engine.optim_step(1e-2).skipped == (step == 1)
            after = values(engine)
            assert step != 1 or all(torch.equal(after[key], value) for key, value in before.items())
            assert engine.memory()["optimizer"] == 0 or piece == UNDIVIDED
        return after


def require_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and any(name.startswith("optimizer.exp_avg_sq.") for name in want)
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []
    assert all(got[name].dtype == tensor.dtype and got[name].shape == tensor.shape for name, tensor in want.items())


@pytest.mark.parametrize(
    ("name", "world", "train"),
    [
        ("tied", 1, {}),
        ("untied", 2, {}),
        ("LoRA", 2, {}),
        ("bf16 masters", 1, {}),
        ("mixture", 2, {}),
        ("tied", 2, {"sharding_strategy": "NO_SHARD"}),
        ("untied", 2, {"mesh": {"tp": 2}}),
        ("wide", 2, {"optimizer": {"clip": 0.1, "kind": "adamw_8bit"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_step_in_pieces_equals_the_undivided_one_to_the_bit(pool: Any, name: str, world: int, train: dict[str, Any]):
    undivided = pool.run(trained, world, UNDIVIDED, name, train)
    for piece in (PIECE, 1 << 30):
        for got, want in zip(pool.run(trained, world, piece, name, train), undivided, strict=True):
            require_equal(got, want)


def bytes_of_steps(rank: int, world: int, piece: int, name: str) -> list[tuple[int, int]]:
    """(peak of what a step makes on the device, bytes of the moments) of the first and the second step."""

    def on_host(*args: Any) -> torch.Tensor:
        with _disable_current_modes():
            return zeros_of(*args)

    sizes = []
    with engine_with(piece, name, world, {}) as engine, patch.object(optim, "zeros_of", on_host):
        for step in range(2):
            backward(engine, step)
            with LiveStorages() as live:
                engine.optim_step(1e-2)
            assert engine.optimizer is not None
            slots = [t for state in engine.optimizer.state.values() for t in state.values()]
            sizes.append((live.peak, sum(local_shard(t).nbytes for t in slots)))
    return sizes


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_has_two_pieces_on_the_device(pool: Any, world: int):
    """Also in the first step. The rest are norms for clipping, and AdamW's counts."""
    for piece, name in ((PIECE, "tied"), (PIECE, "LoRA"), (1 << 30, "tied")):
        for sizes in pool.run(bytes_of_steps, world, piece, name):
            for peak, moments in sizes:
                assert peak < min(2 * piece, 1.25 * moments) + 4096, "alignment adds up to a quarter of tiny tensors"
                assert peak > min(2 * piece, moments)


def killed(folder: Path) -> None:
    """Save after the first step; die in the second one, when a part of the parameters is updated."""
    store, pieces, update = dist.FileStore(str(folder / "store"), 1), [], optim._update
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def dies(*args: Any) -> None:
        update(*args)
        pieces.append(args)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with engine_with(PIECE, "tied", 1, {}) as engine:
        for step in range(2):
            backward(engine, step)
            with patch.object(optim, "_update", dies) if step else nullcontext():
                engine.optim_step(1e-2)
            save(engine, state_folder(folder, step))


def resumed(rank: int, world: int, piece: int, folder: Path | None) -> dict[str, torch.Tensor]:
    """Three steps, or the last two after those that the folder has."""
    with engine_with(piece, "tied", world, {}) as engine:
        if folder is not None:
            engine.load(state_folder(folder, 0))
            assert engine.memory()["optimizer"] == 0 or piece == UNDIVIDED
        for step in range(folder is not None, 3):
            backward(engine, step)
            engine.optim_step(1e-2)
        return values(engine)


def test_a_run_that_was_killed_in_the_middle_of_a_step_continues_to_the_bit(pool: Any, tmp_path: Path):
    """Also with moments on the device, and by the state of a run that had them there."""
    process = mp.get_context("forkserver").Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (want,) = pool.run(resumed, 1, UNDIVIDED, None)
    for piece in (PIECE, UNDIVIDED):
        (got,) = pool.run(resumed, 1, piece, tmp_path)
        require_equal(got, want)
