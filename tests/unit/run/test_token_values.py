"""The token values that a run logs are those of its trainer, and logging them changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from run_contents import assert_equal_tensors, weights
from tiny_run import read_tokens, train, write_run

from meshrl.cluster.actors import RankWorker
from meshrl.monitor.rollout_log import read_rollouts
from meshrl.monitor.token_log import read_token_file, tokens_file

ROLLOUTS = "rollouts/step_{:06d}.jsonl"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("values"))
    written = json.loads(path.read_text())
    written["cluster"] = {"executor": "inline"}
    written["loop"] |= {"num_steps": 2, "samples_per_prompt": 2}
    path.write_text(json.dumps(written))
    return path


@pytest.fixture(scope="module")
def logged(config: Path) -> Path:
    return train(config, "logged")


def scores(folder: Path, row: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Logprob and entropy of each token of a row but the first, by Transformers."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logp = AutoModelForCausalLM.from_pretrained(folder)(row[None]).logits[0, :-1].double().log_softmax(-1)
    return logp.gather(1, row[1:, None])[:, 0].numpy(), -(logp.exp() * logp).sum(-1).numpy()


def test_the_logged_values_are_those_of_the_weights_before_the_step(config: Path, logged: Path):
    path = logged / ROLLOUTS.format(1)
    for entry in list(read_rollouts(path))[:3]:
        (turn,), (values,) = entry.trajectory.turns, read_tokens(path, entry.trajectory.id)
        row = torch.from_numpy(np.concatenate([turn.context_ids, turn.output_ids])).long()
        logprobs, entropies = scores(config.parent / "model", row)
        size, found = len(turn.output_ids), values.columns
        np.testing.assert_allclose(found["logprobs"], logprobs[-size:], atol=1e-4)
        np.testing.assert_allclose(found["entropies"], entropies[-size:], atol=1e-4)
        np.testing.assert_allclose(found["logprobs"], found["rollout_logprobs"], atol=1e-3)
        assert values.trainer_version == 0 and found["trained"].all()
        assert found["characters"].sum() == len(entry.texts[0])


def test_advantages_are_those_of_the_answers(logged: Path):
    path = logged / ROLLOUTS.format(1)
    for entry in read_rollouts(path):
        (values,) = read_tokens(path, entry.trajectory.id)
        group = [e.trajectory.reward for e in read_rollouts(path) if e.trajectory.group_id == entry.trajectory.group_id]
        above = entry.trajectory.reward - np.mean(group)
        assert (np.sign(values.columns["advantages"]) == np.sign(round(above, 6))).all()


def test_the_log_changes_no_weight_and_is_at_most_twice_as_large(config: Path, logged: Path):
    without = train(config, "without", "monitor.rollout_log_every_steps=0")
    assert not (without / "rollouts").exists()
    assert_equal_tensors(weights(logged, 2), weights(without, 2))
    for path in (logged / "rollouts").glob("*.jsonl"):
        assert tokens_file(path).stat().st_size <= path.stat().st_size


@pytest.mark.slow
def test_ranks_return_values_only_for_steps_that_are_logged_and_old_logprobs_are_preferred(
    config: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two updates: the second one's forward has other weights than the sampler."""
    requested, forward_backward = [], RankWorker.forward_backward

    def recording(worker, message, role, version, loss, values=False):
        report = forward_backward(worker, message, role, version, loss, values)
        requested.append((values, len(report.values)))
        return report

    monkeypatch.setattr(RankWorker, "forward_backward", recording)
    options = ("monitor.rollout_log_every_steps=2", "train.updates_per_step=2", "train.optimizer.lr=0.1")
    folder = train(config, "two_updates", *options)
    assert requested == [(True, 4), (True, 4), (False, 0), (False, 0)]
    found = read_token_file(folder / ROLLOUTS.format(1))
    differ = np.abs(found.columns["logprobs"] - found.columns["rollout_logprobs"])
    assert differ.max() < 1e-3 and not np.isnan(found.columns["entropies"]).any()
    assert not tokens_file(folder / ROLLOUTS.format(2)).exists()
