"""vLLM as a contender of rollout.py: meshrl's vLLM engine, with a server that runs under the Python that has vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.core.types import Request
from meshrl.rollout.build import build_rollout_engine

BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU
SERVER = ["-m", "vllm.entrypoints.openai.api_server"]
THREADS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
IDLE_CORES = 0.05  # a server that uses less than this counts as idle
CPU_INTERVAL_S, IDLE_DEADLINE_S = 0.2, 30.0
VERSION_OF = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"


def version_of(python: Path) -> str | None:
    """vLLM's version under that Python; None if vLLM is missing."""
    if not python.exists():
        return None
    done = subprocess.run([str(python), "-c", VERSION_OF], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def cache_bytes(config: Any, dtype: torch.dtype, contexts: Sequence[int]) -> int:
    """Bytes of a KV cache that holds requests of these lengths at the same time, plus the model's longest context,
    which vLLM requires at its start."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    return per_token * (sum(-(-n // BLOCK) * BLOCK for n in contexts) + config.max_position_embeddings)


class VllmRival:
    """A server with one model, for callers without an event loop.

    startup_s: from the start of the process to the answer to a first request. settings: the server's command line, each
    path reduced to its last part, and the server's threads.
    """

    def __init__(self, model: ModelConfig, python: Path, kv_cache_bytes: int, first: Request):
        """first: the request whose answer ends the start-up."""
        others = set(psutil.Process().children(recursive=True))
        self._runner = asyncio.Runner()
        vllm = VllmConfig(python=str(python), kv_cache_bytes=kv_cache_bytes)
        rollout = RolloutConfig(engine="vllm", vllm=vllm)
        began = time.perf_counter()
        self._engine = build_rollout_engine(model, rollout, torch.device("cpu"), 0, ())
        self._engine.trust_loaded_weights()
        self.sample([first])
        self.startup_s = time.perf_counter() - began
        self._processes = [p for p in psutil.Process().children(recursive=True) if p not in others]
        (server,) = (p for p in self._processes if p.cmdline()[1:3] == SERVER)
        self.settings: dict[str, Any] = {
            "arguments": [Path(word).name for word in server.cmdline()[3:]],
            **{name: server.environ().get(name) for name in THREADS},
        }

    def sample(self, requests: Sequence[Request]) -> int:
        """Send all requests at the same time. Returns the number of sampled tokens."""

        async def answers() -> int:
            turns = await asyncio.gather(*map(self._engine.generate, requests))
            return sum(len(turn.output_ids) for turn in turns)

        return self._runner.run(answers())

    def cpu_clock(self) -> float:
        """CPU time used so far by this process and all processes of the server, in seconds."""
        return time.process_time() + self._server_cpu_s()

    def _server_cpu_s(self) -> float:
        return sum(t.user + t.system for t in (p.cpu_times() for p in self._processes))

    def wait_until_idle(self) -> None:
        """Wait until the server's processes stop spinning, a second after their last work. The next contender needs the
        cores.

        Raises: RuntimeError when they do not stop.
        """
        until = time.monotonic() + IDLE_DEADLINE_S
        while time.monotonic() < until:
            before, began = self._server_cpu_s(), time.perf_counter()
            time.sleep(CPU_INTERVAL_S)
            cores = (self._server_cpu_s() - before) / (time.perf_counter() - began)
            if cores < IDLE_CORES:
                return
        raise RuntimeError(f"vLLM has no requests, but after {IDLE_DEADLINE_S:g} s it still uses {cores:.2f} cores")

    def close(self) -> None:
        """End the server."""
        self._runner.run(self._engine.close())
        self._runner.close()
