"""The text about the disk at the start of a run, from the config and the sizes of states and models."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.plan.disk_use import disk_use

GB, TB = 10**9, 10**12
SIZES = 6 * GB, GB, True
NO_BEST = {"save_best": False}


def _config(**sections: dict[str, Any]) -> RunConfig:
    given: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"path": "d", "max_prompt_tokens": 100},
        "rollout": {"sampling": {"max_new_tokens": 205}},
        "loop": {"num_steps": 10_000, "prompts_per_step": 10, "samples_per_prompt": 8},
    }
    for name, keys in sections.items():
        given[name] = given.get(name, {}) | keys
    return RunConfig.model_validate(given)


def _sft(save_every_steps: int) -> SftRunConfig:
    sft = {"path": "d", "num_steps": 100, "save_every_steps": save_every_steps}
    return SftRunConfig.model_validate({"model": {"path": "m"}, "sft": sft})


def test_the_line_lists_all_that_a_run_writes_and_the_room():
    config = _config(loop={"eval_every_steps": 100, "save_every_steps": 50}, run={"keep_models": 3})
    assert disk_use(config, *SIZES, free_bytes=TB) == (
        "disk: at most 26.0 GB, and rollouts, 1.0 TB free: states 18.0 GB (3 x 6.0 GB; written every 50 steps, at the "
        "end, newest 2 kept), models 8.0 GB (4 + 4 that were the best, x 1.0 GB; newest 3 kept), metrics 30.3 MB"
    )


@pytest.mark.parametrize(
    ("every_steps", "loop", "expected"),
    [
        (0, {}, "states 6.0 GB (1 x 6.0 GB; written at the end, newest 2 kept)"),
        (None, {}, "states 18.0 GB (3 x 6.0 GB; written every 600 s, at the end, newest 2 kept)"),
        (6000, {}, "states 12.0 GB (2 x 6.0 GB; written every 6000 steps, at the end, newest 2 kept)"),
        (
            None,
            {"eval_every_steps": 20},
            "states 18.0 GB (3 x 6.0 GB; written at each evaluation (every 20 steps), every 600 s, at the end, newest "
            "2 kept)",
        ),
        (10, {"num_steps": 1}, "states 6.0 GB (1 x 6.0 GB; written every 10 steps, at the end, newest 2 kept)"),
    ],
)
def test_states_are_counted_by_steps_evaluations_and_time(every_steps, loop, expected):
    """With one that is being written next to those that are kept."""
    assert f": {expected}, models " in disk_use(_config(loop=loop | {"save_every_steps": every_steps}), *SIZES)


@pytest.mark.parametrize(
    ("every_steps", "sections", "expected"),
    [
        (0, {"loop": NO_BEST}, "1.0 GB (1 x 1.0 GB; all kept"),
        (1000, {"loop": NO_BEST}, "10.0 GB (10 x 1.0 GB; all kept"),
        (3000, {"loop": NO_BEST}, "4.0 GB (4 x 1.0 GB; all kept"),
        (
            1000,
            {"loop": NO_BEST, "run": {"keep_models": 2}},
            "3.0 GB (3 x 1.0 GB; newest 2 kept",
        ),
        (0, {}, "2.0 GB (1 + 1 that were the best, x 1.0 GB; all kept"),
        (
            None,
            {"loop": {"eval_every_steps": 10}},
            "5.0 GB (1 + 4 that were the best, x 1.0 GB; all kept",
        ),
        (
            0,
            {"loop": NO_BEST, "model": {"lora": {"enabled": True}}},
            "3.0 GB (1 x 3.0 GB; all kept",
        ),
    ],
)
def test_models_are_counted_with_those_that_were_the_best_and_with_adapters(every_steps, sections, expected):
    loop = sections.get("loop", {}) | {"save_every_steps": every_steps}
    assert f", models {expected}), metrics " in disk_use(_config(**sections | {"loop": loop}), *SIZES)


def test_a_run_without_held_out_prompts_has_no_best_model():
    assert "best" not in disk_use(_config(), 1, 1, False)


def test_supervised_training_writes_one_model():
    assert disk_use(_sft(10), *SIZES, free_bytes=TB) == (
        "disk: at most 19.0 GB, 1.0 TB free: states 18.0 GB (3 x 6.0 GB; written every 10 steps, at the end, newest 2 "
        "kept), models 1.0 GB (1 x 1.0 GB; all kept), metrics 300.0 kB"
    )


def test_a_run_that_may_not_fit_gets_a_warning_with_the_keys():
    """What a run that continues has written before counts as room."""
    assert "warning" not in disk_use(_sft(0), *SIZES, free_bytes=7_000_300_000)
    line, warning = disk_use(_sft(0), *SIZES, free_bytes=7_000_299_999).splitlines()
    assert "7.0 GB free" in line and warning.startswith("warning: the disk may become full")
    assert "run.keep_checkpoints or run.keep_models" in warning
    text = disk_use(_sft(0), *SIZES, 5 * GB, 2_000_300_000)
    assert text.startswith("disk: at most 7.0 GB (5.0 GB of it exist), 2.0 GB free: ") and "warning" not in text
