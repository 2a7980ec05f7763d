"""A real model, SmolLM2-135M-Instruct: its logprobs, gradients, greedy answers, chat template and runs, on real
weights. Skipped where the package that has the model can't be fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import engine_over, unsharded
from rank_pool import RankPool
from real_model import folder_of_run, prompts, real_model
from tiny_models import widen
from tiny_run import train

from meshrl.algo.losses import sft_loss
from meshrl.data.chat import load_tokenizer, render, stop_token_ids
from meshrl.model.recipe import load_causal_lm
from meshrl.parallel.fsdp import full_tensor
from meshrl.tools.model_check.checks import CHECKS, findings
from meshrl.train.packing import bare_row, pack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_model(tmp_path_factory)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks with more time than those of tiny models."""
    ranks = RankPool(2, timeout_s=400.0)
    yield ranks
    ranks.close()


def _loaded(model: str, dtype: torch.dtype) -> torch.nn.Module:
    lm = load_causal_lm(model)
    for p in lm.parameters():
        p.data = p.data.to(dtype)
    return widen(lm) if dtype == torch.float64 else lm


def _distances(
    rank: int, world: int, model: str, rows: list[list[int]], dtype: torch.dtype
) -> tuple[float, float, float, str]:
    """From the unsharded fp64 model of Transformers: the largest difference of a logprob in nats; the distance of the
    complete gradient by its norm; that of the worst tensor by its own norm, and its name."""
    samples = [bare_row(str(i), row, scored=True) for i, row in enumerate(rows)]
    total = sum(int(s.mask.sum()) for s in samples)
    for s in samples:
        s.loss_weight = np.where(s.mask, 1 / total, 0.0)
    want = unsharded(_loaded(model, torch.float64), samples, sft_loss)
    engine = engine_over(_loaded(model, dtype), world, {"activation_checkpointing": world == 2})
    mine = [i for i in range(len(rows)) if i % world == rank]
    result = engine.forward_backward([pack([samples[i] for i in mine], mine)], sft_loss)
    apart = max(float(np.abs(row - want["logprobs"][i]).max()) for i, row in result.logprobs.items())
    worst, squares = (0.0, ""), 0.0
    for name, p in engine.model.lm.named_parameters():
        distance = float(np.linalg.norm(full_tensor(p.grad).numpy().astype(np.float64) - want["grads"][name]))
        worst = max(worst, (distance / float(np.linalg.norm(want["grads"][name])), name))
        squares += distance**2
    return apart, math.sqrt(squares) / want["norm"], *worst


@pytest.mark.parametrize("world", [1, 2])
def test_logprobs_and_gradients_equal_those_of_transformers(pool, model: str, world: int):
    rows = [ids.tolist() for ids in prompts(model, 4)]
    for apart, distance, of_one, name in pool.run(_distances, world, model, rows, torch.float64):
        assert apart < 1e-5  # logprobs are returned in fp32
        assert distance < 1e-10 and of_one < 1e-10, f"{name} is {of_one:.1e} of its norm off"


def test_rounding_to_fp32_moves_the_gradient_less_than_a_hundred_thousandth(pool, model: str):
    """Transformers' own fp32 gradient of these rows is 1.6e-5 from the exact one, its worst tensor 1.9e-4."""
    rows = [ids.tolist() for ids in prompts(model, 4)]
    ((apart, distance, of_one, name),) = pool.run(_distances, 1, model, rows, torch.float32)
    assert apart < 1e-4 and distance < 1e-5
    assert of_one < 1e-4, f"{name} is {of_one:.1e} of its norm off"


def test_every_check_of_model_check_holds_in_fp32(pool, model: str):
    """Of the complete model, against Transformers in fp32: logprobs and gradients of rows alone, packed and on two
    FSDP2 ranks, embedded sampling, the exported model, and LoRA, with merged weights and with adapters alike.
    """
    results = dict(findings(Path(model), pool.run))
    assert results.keys() == CHECKS.keys()
    assert {name: str(found) for name, found in results.items() if not found.proven} == {}


def test_greedy_answers_equal_those_of_generate(model: str):
    from meshrl.config.model import ModelConfig
    from meshrl.config.rollout import RolloutConfig
    from meshrl.core.types import Request, SamplingParams
    from meshrl.rollout.embedded.engine import build_embedded_engine

    contexts, tokenizer = prompts(model, 64), load_tokenizer(model)
    stops = stop_token_ids(tokenizer, model)
    cfg = ModelConfig(path=model, dtype="float32")
    engine = build_embedded_engine(cfg, RolloutConfig(), torch.device("cpu"), "real", stops)
    engine.trust_loaded_weights()
    for i, ids in enumerate(contexts):
        greedy = SamplingParams(temperature=0)
        engine.submit(Request(id=str(i), context_ids=ids, sampling=greedy, max_new_tokens=24, seed=0))
    answers: dict[str, Any] = {}
    while engine.has_work:
        answers |= dict(engine.step())
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for i, ids in enumerate(contexts):
        context = torch.from_numpy(ids.astype(np.int64))[None]
        out = lm.generate(
            context, attention_mask=torch.ones_like(context), max_new_tokens=24, do_sample=False, eos_token_id=[*stops]
        )
        assert answers[str(i)].output_ids.tolist() == out[0, len(ids) :].tolist(), tokenizer.decode(ids)


def test_twenty_turns_are_rendered_as_the_tokenizer_renders_them(model: str):
    tokenizer, messages = load_tokenizer(model), []
    for turn in range(20):
        messages.append({"role": "user", "content": f"Turn {turn}: what is {turn} + 1?\n"})
        want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert render(tokenizer, messages).tolist() == list(want)
        messages.append({"role": "assistant", "content": f"It is {turn + 1}."})


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.executor=inline",),
        ("cluster.executor=inline", "model.lora.enabled=true"),
        ("loop.kind=one_step_off", "cluster.num_rollout_ranks=1"),
        ("loop.kind=fully_async", "cluster.num_rollout_ranks=1"),
    ],
    ids=["colocated", "lora", "one_step_off", "fully_async"],
)
def test_two_steps_of_each_schedule_with_their_proofs_and_a_model_that_transformers_loads(
    tmp_path: Path, model: str, overrides: tuple[str, ...]
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder_of_run(tmp_path / "my", model)
    small = (
        "loop.num_steps=2",
        "loop.prompts_per_step=2",
        "loop.samples_per_prompt=4",
        "data.eval_fraction=null",
    )
    limits = ("rollout.sampling.max_new_tokens=16", "loop.eval_every_steps=0", "cluster.num_train_ranks=1")
    where = f"run.folder={tmp_path / 'runs'}"
    run = train(tmp_path / "my" / "config.yaml", "real", *small, *limits, where, *overrides)
    steps = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").open() if "metrics" in line]
    trained = [step for step in steps if "train/grad_norm" in step]
    assert len(trained) == 2 and all(math.isfinite(step["train/grad_norm"]) for step in trained)
    assert all(step["sync/proven_read_back"] == 1.0 for step in steps if "sync/proven_read_back" in step)
    folder = run / "checkpoints" / "step_000002" / "model"
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.from_numpy(prompts(model, 1)[0].astype(np.int64))[None]
    assert torch.isfinite(lm(ids).logits).all() and tokenizer.chat_template
