"""Commands for a role that is not the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from tiny_models import tiny_qwen2
from tiny_samples import random_samples, weigh
from tiny_specs import worker_spec

from meshrl.algo.losses import make_policy_loss
from meshrl.cluster.inline import InlineExecutor
from meshrl.cluster.train_group import TrainGroup
from meshrl.config.algo import AlgoConfig
from meshrl.config.model import ModelConfig
from meshrl.core.types import POLICY, RoleSpec

CRITIC = RoleSpec(name="critic", trains=True, optimizer="adamw")


def test_training_another_role_neither_changes_the_policy_nor_compares_with_the_sampler(tmp_path: Path):
    tiny_qwen2().save_pretrained(tmp_path / "model")
    spec = worker_spec(model=ModelConfig(path=str(tmp_path / "model"), dtype="float32"), roles=(POLICY, CRITIC))

    async def run() -> None:
        executor = InlineExecutor([spec])
        trainer = TrainGroup(executor)
        try:
            await executor.start()
            trainer.version, trainer.is_synced = 0, True
            rows, loss = trainer.plan_rows(weigh(random_samples(0, [9, 7]))), make_policy_loss(AlgoConfig())
            lm = executor.worker.engines["policy"].model.lm
            before = [p.detach().clone() for p in lm.parameters()]
            report = await trainer.forward_backward(rows, "critic", loss)
            assert not report.mismatch and report.metrics
            step = await trainer.optim_step("critic", 0.1)
            assert not step.skipped and step.grad_norm > 0
            assert trainer.is_synced and trainer.num_optim_steps == 0
            assert all(torch.equal(old, p) for old, p in zip(before, lm.parameters(), strict=True))
            assert sorted((await trainer.forward_backward(rows, "policy", loss)).mismatch) == [0, 1]
            await trainer.optim_step("policy", 0.1)
            assert not trainer.is_synced and trainer.num_optim_steps == 1
            await trainer.save(str(tmp_path))
            assert len(await trainer.finish_save()) == 2, "a file of each trained role"
        finally:
            await executor.close()

    threads = torch.get_num_threads()
    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(threads)
