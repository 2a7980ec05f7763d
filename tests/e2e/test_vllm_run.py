"""`meshrl train` with vLLM as the sampler: split, colocated, and with a server that is killed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_models import tiny_qwen2
from tiny_run import steps_of, train, write_run
from tiny_tokenizers import tiny_tokenizer
from vllm_servers import MISSING, MODEL

from meshrl.core.errors import SamplerMismatchError
from meshrl.model.lora import merged_rows
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.rollout.server import weights
from meshrl.rollout.vllm import dialect
from meshrl.rollout.vllm.dialect import VllmDialect

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(600)]

VLLM = (
    "rollout.engine=vllm",
    "rollout.vllm.kv_cache_bytes=33554432",
    "rollout.max_running_requests=16",
    "rollout.vllm.args=[--enforce-eager]",
)
RELEASING = (f"rollout.vllm.python={sys.executable}", "rollout.release_memory=true")
PARALLEL = ("cluster.num_train_ranks=2", "rollout.mesh.infer_tp=2")
TRAINER_TP = ("cluster.num_train_ranks=2", "train.mesh.tp=2", "cluster.num_rollout_ranks=1")
SPLIT = ("cluster.num_train_ranks=2", "cluster.num_rollout_ranks=1")
ADAPTERS = ("model.lora.enabled=true", "rollout.sync_mode=delta")  # the server's rank merges them
LORA = (*SPLIT, *ADAPTERS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_run(tmp_path)
    shape = {name: value for name, value in MODEL.items() if name != "tie_word_embeddings"}
    tiny_qwen2(vocab_size=len(tiny_tokenizer()), initializer_range=0.1, **shape).save_pretrained(tmp_path / "model")
    return path


@pytest.fixture
def others() -> set[int]:
    """The ids of processes of other tests' servers."""
    return {process.pid for process in of_vllm(set())}


def of_vllm(others: set[int]) -> list[psutil.Process]:
    """Processes of vLLM below this process, without `others`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if process.pid in others:
            continue
        try:
            words = [process.name(), *process.cmdline()]
            found += [process] if any(word.startswith(("VLLM", "vllm.entrypoints")) for word in words) else []
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SPLIT, id="split", marks=pytest.mark.slow),
        pytest.param(RELEASING, id="colocated, releasing memory"),
        pytest.param(PARALLEL, id="tensor parallel", marks=pytest.mark.slow),
        pytest.param(TRAINER_TP, id="split, tensor parallelism in training", marks=pytest.mark.slow),
        pytest.param(LORA, id="split, LoRA"),
    ],
)
def test_a_run_samples_with_vllm_and_proves_its_weights(config: Path, layout: tuple[str, ...], others: set[int]):
    """After each update, the trainer's logprobs of vLLM's samples agree to rounding, with a tied head."""
    steps = steps_of(train(config, "vllm", *VLLM, *layout), ("s", "tokens/s", "GB/s"))
    assert len(steps) == 2 and all(("memory/released_bytes" in step) == (layout == RELEASING) for step in steps)
    for step in steps:
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
        assert step["proof/logprob_abs_diff_mean"] < 1e-4
    assert of_vllm(others) == []


def test_vllm_samples_while_the_trainer_trains(config: Path, others: set[int]):
    """Answers begin under older weights, and each sync's probe compares vLLM's scores with the trainer's.
    That answers go on under new weights depends on the time here; tests/contract/test_rollout_engines.py has it."""
    overlapped = ("loop.kind=fully_async", "loop.max_staleness=2", "loop.num_steps=6", "loop.prompts_per_step=2")
    long = ("rollout.sampling.max_new_tokens=120", "cluster.num_rollout_ranks=1")
    folder = train(config, "overlapped", *VLLM, *overlapped, *long)
    steps = steps_of(folder)
    assert len(steps) == 6 and all(step["sync/proven_read_back"] == 1 for step in steps)
    assert all(step["proof/probe_diff_mean"] < 1e-3 for step in steps[1:])
    records = [r for path in sorted((folder / "rollouts").glob("step_*.jsonl")) for r in read_rollouts(path)]
    assert Counter(r.trajectory.prompt.ordinal for r in records) == dict.fromkeys(range(12), 4)
    assert any(turn.versions.min() < r.step - 1 for r in records for turn in r.trajectory.turns)
    assert of_vllm(others) == []


def test_a_stale_prefix_cache_ends_a_run_that_trains_older_samples(config: Path, monkeypatch: pytest.MonkeyPatch):
    """The probe has a context that the cache has, too. On a CPU vLLM caches blocks of 128 tokens."""

    async def keep_cache(self: VllmDialect, label: str, has_cache: bool) -> None: ...

    monkeypatch.setattr(VllmDialect, "begin_update", keep_cache)
    stale = ("cluster.executor=inline", "loop.kind=one_step_off", "loop.num_steps=4", "train.optimizer.lr=0.05")
    long = (f"data.system={'0+1=1 ' * 40}", "data.max_prompt_tokens=600", "train.max_tokens_per_microbatch=2000")
    with pytest.raises(SamplerMismatchError, match="at weight version 1 the logprobs of sampler vllm-0"):
        train(config, "stale", *VLLM, *stale, *long)
    assert len(steps_of(config.parent / "runs" / "stale")) == 1


def server_with(extension: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have this worker extension in place of meshrl's."""
    command = dialect.command_line

    def faulty(python: str, module: str, values: dict[str, object], *rest: Any) -> list[str]:
        return command(python, module, {**values, "--worker-extension-cls": extension}, *rest)

    monkeypatch.setattr(dialect, "command_line", faulty)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))


def server_with_old_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first adapters are merged at each sync. The server is proven to have what was sent to it."""
    former: dict[int, torch.Tensor] = {}

    def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
        return merged_rows(weight, former.setdefault(id(a), a.clone()), former.setdefault(id(b), b.clone()), scale)

    monkeypatch.setattr(weights, "merged_rows", merged)


STALE = {
    "head": (partial(server_with, "vllm_stale_copies.Head"), ()),
    "layers": (partial(server_with, "vllm_stale_copies.Layers"), ()),
    "adapters": (server_with_old_adapters, ADAPTERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["colocated", "one_step_off", "fully_async"])
@pytest.mark.parametrize(("plant", "options"), STALE.values(), ids=STALE)
def test_a_stale_copy_in_a_server_ends_the_run(
    plant: Callable[[pytest.MonkeyPatch], None],
    options: tuple[str, ...],
    kind: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Faults that no read-back finds: what the server samples is compared."""
    plant(monkeypatch)
    short = ("cluster.executor=inline", "loop.num_steps=5", "loop.prompts_per_step=2", "train.optimizer.lr=0.05")
    with pytest.raises(SamplerMismatchError, match="at weight version 1 the logprobs of sampler vllm-0"):
        train(config, "stale", *VLLM, *short, f"loop.kind={kind}", "algo.correction=off", *options)
    assert sum("loss/policy" in step for step in steps_of(config.parent / "runs" / "stale")) <= 2


@pytest.mark.slow
def test_a_killed_server_is_replaced_with_its_rank(config: Path, others: set[int]):
    """The server's rank ends, a new rank replaces it and gets the weights, and the run continues."""
    killed = []

    def kill_one(metrics: Path) -> None:
        while not metrics.is_file() or "loss" not in metrics.read_text():
            time.sleep(0.1)
        for process in of_vllm(others):
            process.kill()
            killed.append(process.pid)

    metrics = config.parent / "runs" / "killed" / "metrics.jsonl"
    threading.Thread(target=kill_one, args=(metrics,), daemon=True).start()
    steps = steps_of(train(config, "killed", *VLLM, *SPLIT, "loop.num_steps=4"))
    assert killed and len(steps) == 4
    assert sum(step["rollout/ranks_replaced"] for step in steps) == 1
    assert of_vllm(others) == []
