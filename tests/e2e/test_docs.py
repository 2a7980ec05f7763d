"""The code of the documents runs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import steps_of, train, write_run
from tiny_samples import random_groups

from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import make_policy_loss
from meshrl.algo.reduce import assign_loss_weights
from meshrl.algo.trial import try_user_functions
from meshrl.config.load import load_run_config
from meshrl.core.batch import Outputs
from meshrl.train.packing import pack

ROOT = Path(__file__).parents[2]


def test_follow_one_prompt_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs" / "follow_one_prompt.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    monkeypatch.chdir(ROOT)
    exec("\n".join(blocks), {"__name__": "__main__"})


def test_the_six_files_that_follow_one_prompt_lists_exist():
    text = (ROOT / "docs" / "follow_one_prompt.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `(meshrl/[a-z_/]+\.py)`", text, re.MULTILINE)
    assert len(files) == 6
    assert all((ROOT / name).is_file() for name in files)


def test_the_page_about_adding_an_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/add_an_environment.md: its game is played without a model, its config trains, and its functions grade."""
    text = (ROOT / "docs" / "add_an_environment.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (_, guess), (_, config), (_, episode), (_, few_guesses), (_, games) = blocks
    config_path = write_run(tmp_path)
    (tmp_path / "guess.py").write_text(guess)
    (tmp_path / "games.py").write_text(few_guesses + games)
    (tmp_path / "my.yaml").write_text(f"base: {config_path.name}\n{config}")
    (tmp_path / "games.yaml").write_text(
        "base: my.yaml\nagent: {args: {environment: 'games:Games', settings: null}}\n"
        "reward: {terms: {few: {kind: 'games:few_guesses'}, only: {kind: 'tiny_run:length', envs: [guess]}}}\n"
        "data: {path: null, sources: {guess: {path: rows.jsonl}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(episode, {})
    for name in ("my", "games"):
        folder = train(tmp_path / f"{name}.yaml", name, "cluster.executor=inline")
        steps = steps_of(folder)
        assert len(steps) == 2 and all(step["rollout/crashed_fraction"] == 0 for step in steps), name
        assert "My number is from 0 to" in (folder / "rollouts" / "step_000001.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_page_about_adding_a_model_works(tmp_path: Path):
    """docs/add_a_model.md: its class is refused until the fact about its head is stated; then every check is proven, in
    the processes of two ranks, too."""
    text = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|toml|json)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (_, model), (_, project), (_, config), (_, fact) = blocks
    entry_points = tomllib.loads(project)["project"]["entry-points"]
    installed = tmp_path / "calm_gemma-1.0.dist-info"  # what `pip install -e .` adds to an environment
    for folder in (installed, tmp_path / "calm"):
        folder.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: calm-gemma\nVersion: 1.0\n")
    ((group, points),) = entry_points.items()
    lines = [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "calm" / "config.json").write_text(config)

    def check(code: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "calm_gemma.py").write_text(code)
        places = os.pathsep.join([str(tmp_path), str(ROOT)])
        command = [sys.executable, "-m", "meshrl", "model-check", "calm"]
        environment = {**os.environ, "PYTHONPATH": places}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    refused = check(model)
    assert refused.returncode == 2, refused.stderr
    assert "CalmGemmaForCausalLM of 'calm' gives a single row logprobs that differ by" in refused.stderr
    done = check(model + fact)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(.+?) +\w[\w ]*: largest difference", done.stdout, re.MULTILINE) == ["proven"] * 9


def test_the_page_about_adding_an_algorithm_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/add_an_algorithm.md: its blocks run. Its GSPO, from the config to the gradient of packed rows that share a
    prompt, equals the paper's equations 5 to 7, computed here in plain floats with finite differences."""
    text = (ROOT / "docs" / "add_an_algorithm.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (_, gspo), (_, config), (_, trial), (_, batch_scaled), (_, advantage) = blocks
    config_path = write_run(tmp_path)
    (tmp_path / "gspo.py").write_text(gspo)
    (tmp_path / "batch_scaled.py").write_text(batch_scaled)
    (tmp_path / "paper.yaml").write_text(f"base: {config_path.name}\n{config}")
    (tmp_path / "own_advantage.yaml").write_text(f"base: {config_path.name}\n{advantage}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(gspo + trial + batch_scaled, {})
    try_user_functions(load_run_config(tmp_path / "own_advantage.yaml").config.algo)

    algo = load_run_config(tmp_path / "paper.yaml").config.algo
    try_user_functions(algo)
    samples = random_groups(0, [5], [2, 3, 1, 4])
    log_ratios = [
        [0.1, 0.3],
        [-0.4, 0.1, 0.0],
        [0.0002],
        [-0.3, -0.1, 0.2, -0.1],
    ]  # clipped, clipped, inside, unclipped
    rewards = [1.0, 0.0, 0.0, 1.0]
    for sample, reward in zip(samples, rewards):
        sample.reward = reward
        sample.old_logprobs = np.where(sample.mask, np.float32(-1.5), np.float32(np.nan))
    assign_advantages(samples, algo)
    assign_loss_weights(samples, algo, max_new_tokens=8)
    batch = pack(samples, [0, 1, 2, 3])
    assert len(batch.rows) == 5, "the four answers share one prompt"
    logprobs = torch.full([batch.num_tokens], float("nan"), dtype=torch.float64)
    logprobs[batch.mask] = torch.tensor([-1.5 + d for row in log_ratios for d in row], dtype=torch.float64)
    logprobs.requires_grad_()
    value, metrics = make_policy_loss(algo)(Outputs(logprobs=logprobs), batch)
    value.backward()

    def paper(flat: list[float]) -> float:
        std = math.sqrt(sum((r - 0.5) ** 2 for r in rewards) / 3)
        rest, total = list(flat), 0.0
        for r, row in zip(rewards, log_ratios):
            own, rest = rest[: len(row)], rest[len(row) :]
            s, a = math.exp(sum(own) / len(own)), (r - 0.5) / std
            total += min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a)
        return -total / 4

    flat, h = [d for row in log_ratios for d in row], 1e-6
    slopes = [
        (paper([*flat[:i], flat[i] + h, *flat[i + 1 :]]) - paper([*flat[:i], flat[i] - h, *flat[i + 1 :]])) / (2 * h)
        for i in range(len(flat))
    ]
    assert value.item() == pytest.approx(paper(flat), rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[batch.mask].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)
    assert [slope != 0 for slope in slopes] == [False] * 5 + [True] * 5
    assert {m.name: m.sum for m in metrics}["loss/clip_fraction"] == 5
