"""vLLM with a real model, SmolLM2-135M-Instruct: its logprobs, a run's proofs, and greedy answers of the export."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_model import folder_of_run, prompts, real_model
from tiny_engines import ask, scores
from tiny_engines import run as answers_of
from tiny_run import train
from vllm_servers import MISSING

from meshrl.config.model import ModelConfig
from meshrl.config.rollout import RolloutConfig, VllmConfig
from meshrl.core.types import Turn
from meshrl.data.chat import load_tokenizer, stop_token_ids
from meshrl.loops.sync_and_probe import FLOOR_NATS
from meshrl.model.causal import CausalModel
from meshrl.model.recipe import load_causal_lm
from meshrl.rollout.embedded.engine import build_embedded_engine
from meshrl.rollout.server.dialect import ServerSpec
from meshrl.rollout.server.engine import ServerEngine
from meshrl.rollout.vllm.dialect import VllmDialect, http_of, start_server

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
# Mean difference from the trainer, nats per token. vLLM rounds logits to its dtype: in bf16 those from 16 to 32 by up
# to 0.0625. Measured: 0.021 for greedy answers, 0.042 for sampled ones.
ROUNDING_NATS = {"bfloat16": 0.0625, "float32": FLOOR_NATS["float32"]}
MAX_CONTEXT_TOKENS = 512
MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_model(tmp_path_factory)


def config() -> RolloutConfig:
    return RolloutConfig(
        engine="vllm",
        max_running_requests=16,
        vllm=VllmConfig(kv_cache_bytes=512 << 20, args=["--enforce-eager"]),
    )


@contextmanager
def served(model: str, dtype: str) -> Iterator[ServerEngine]:
    """vLLM with the weights of the model's folder."""
    spec = ServerSpec(
        model=ModelConfig(path=model, dtype=dtype),
        rollout=config(),
        device=torch.device("cpu"),
        name="vllm",
        max_context_tokens=MAX_CONTEXT_TOKENS,
    )
    server = start_server(spec)
    stops = stop_token_ids(load_tokenizer(model), model)
    facts: dict[str, Any] = {"stop_token_ids": stops, "max_context_tokens": MAX_CONTEXT_TOKENS, "vocab_size": 49152}
    try:
        engine = ServerEngine(VllmDialect(http_of(server), None, can_release=True), **facts)
        engine.trust_loaded_weights()
        yield engine
    finally:
        server.close()


def greedy_answers(model: str, contexts: list[np.ndarray]) -> list[list[int]]:
    """Those of the embedded engine, in fp32."""
    stops = stop_token_ids(load_tokenizer(model), model)
    engine = build_embedded_engine(
        ModelConfig(path=model, dtype="float32"), RolloutConfig(), torch.device("cpu"), "embedded", stops
    )
    engine.trust_loaded_weights()
    requests = [
        ask(str(i), ids, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, seed=0) for i, ids in enumerate(contexts)
    ]
    turns = answers_of(engine, requests)
    return [turns[str(i)].output_ids.tolist() for i in range(len(contexts))]


def test_logprobs_in_bf16_differ_from_the_trainers_by_the_rounding_of_logits(model: str):
    contexts = prompts(model, 16)
    requests = [ask(str(i), ids, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS) for i, ids in enumerate(contexts)]
    lm = CausalModel(load_causal_lm(model, dtype=torch.bfloat16))

    async def answers(engine: ServerEngine) -> list[Turn]:
        return [await engine.generate(request) for request in requests]

    with served(model, "bfloat16") as engine:
        turns = asyncio.run(answers(engine))
    differences = []
    for context, turn in zip(contexts, turns, strict=True):
        differences.append(np.abs(scores(lm, [*context, *turn.output_ids])[len(context) :] - turn.logprobs))
    mean = float(np.concatenate(differences).mean())
    assert 0 < mean < ROUNDING_NATS["bfloat16"], f"{mean:.3g} nats per token"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_with_vllm_is_proven_and_vllm_answers_like_its_export(tmp_path: Path, model: str, dtype: str):
    folder_of_run(tmp_path / "my", model)
    small = (
        "loop.num_steps=2",
        "loop.prompts_per_step=2",
        "loop.samples_per_prompt=4",
        "data.eval_fraction=null",
    )
    limits = ("rollout.sampling.max_new_tokens=16", "loop.eval_every_steps=0", "cluster.num_train_ranks=1")
    vllm = ("rollout.engine=vllm", "rollout.vllm.args=[--enforce-eager]", "rollout.vllm.kv_cache_bytes=536870912")
    where = (f"run.folder={tmp_path / 'runs'}", f"model.dtype={dtype}", "model.lora.enabled=false")
    run = train(tmp_path / "my" / "config.yaml", "real", *small, *limits, *vllm, *where)
    steps = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").open() if "metrics" in line]
    proven = [step for step in steps if "proof/logprob_abs_diff_mean" in step]
    assert len(proven) == 2
    for step in proven:
        assert step["proof/logprob_abs_diff_mean"] < ROUNDING_NATS[dtype]
        assert step["sync/proven_wire"] == step["sync/proven_read_back"] == 1
    if dtype == "bfloat16":  # near ties of two tokens are decided by rounding
        return
    export = str(run / "checkpoints" / "step_000002" / "model")
    contexts = prompts(model, 64)
    want = greedy_answers(export, contexts)

    async def answers(engine: ServerEngine) -> list[list[int]]:
        requests = [ask(str(i), ids, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS) for i, ids in enumerate(contexts)]
        turns = await asyncio.gather(*(engine.generate(request) for request in requests))
        return [turn.output_ids.tolist() for turn in turns]

    with served(export, dtype) as engine:
        assert asyncio.run(answers(engine)) == want
