"""The comparison of a run's plan with the machine's memory, before it starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_qwen2
from tiny_tokenizers import tiny_tokenizer

from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.core.errors import ConfigError
from meshrl.model.costs import run_memory
from meshrl.plan.memory import CACHE, PHASES
from meshrl.process.diagnosis import memory_limit
from meshrl.run import memory_check
from meshrl.run.memory_check import plan_memory


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SftRunConfig:
    """Of a model whose blocks store much: two ranks with rows of 2,048 tokens, without activation checkpointing."""
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen2(num_hidden_layers=4, max_position_embeddings=4096).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return SftRunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "train": {"activation_checkpointing": False, "max_tokens_per_microbatch": 65536},
            "sft": {"path": "rows.jsonl", "num_steps": 1, "rows_per_step": 128, "max_row_tokens": 2048},
            "cluster": {"num_train_ranks": 2},
        }
    )


@pytest.fixture(scope="module")
def need(config: SftRunConfig) -> int:
    (rank,) = run_memory(config, "cpu")[1]
    return max(2 * rank.total(phase) for phase in PHASES)


@pytest.fixture
def check_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig | SftRunConfig, int], str | None]:
    """The note on a run on a machine with this limit."""

    def check(cfg: RunConfig | SftRunConfig, limit: int) -> str | None:
        notes = list[str]()
        monkeypatch.setattr(memory_check, "memory_limit", lambda: limit)
        plan_memory(cfg, notes.append)
        return notes[0] if notes else None

    return check


def test_a_run_that_fits_starts_without_a_word(check_memory, config: SftRunConfig, need: int):
    assert check_memory(config, int(1.2 * need)) is None


def test_a_run_that_may_not_fit_gets_a_note(check_memory, config: SftRunConfig, need: int):
    note = check_memory(config, need)
    assert note is not None and "may end for lack of memory" in note


def test_a_run_that_does_not_fit_is_refused_with_a_change_of_which_it_does(
    check_memory, config: SftRunConfig, need: int
):
    with pytest.raises(ConfigError, match=r"Set train\.max_tokens_per_microbatch=32768") as error:
        check_memory(config, int(0.9 * need))
    assert "run.ignore_plan=true" in str(error.value)
    smaller = config.train.model_copy(update={"max_tokens_per_microbatch": 32768})
    assert check_memory(config.model_copy(update={"train": smaller}), int(0.9 * need)) is None
    ignored = config.run.model_copy(update={"ignore_plan": True})
    assert check_memory(config.model_copy(update={"run": ignored}), int(0.5 * need)) is None


def test_a_cache_that_grows_with_the_answers_is_no_reason_to_refuse(check_memory, config: SftRunConfig):
    """Of 256 rows of 4,096 tokens. With the limit of the note it fits."""
    values = {
        "model": config.model.model_dump(),
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 96},
        "rollout": {"sampling": {"max_new_tokens": 4000}, "max_context_tokens": 4096},
        "train": {"max_tokens_per_microbatch": 4096},
        "loop": {"num_steps": 1, "prompts_per_step": 32, "samples_per_prompt": 8},
        "cluster": {"num_train_ranks": 2},
    }
    run = RunConfig.model_validate(values)
    (rank,) = run_memory(run, "cpu")[1]
    cache = rank.device[CACHE]["rollout"]
    limit = int(2 * (rank.total("rollout") - cache // 2))
    assert run_memory(run, "cpu", limit)[1][0].device[CACHE]["rollout"] == cache  # a CPU's cache has no limit
    note = check_memory(run, limit)
    assert note is not None and "Without the sampler's cache, which grows with the answers, it needs" in note
    found = re.search(r"rollout\.embedded\.kv_cache_bytes=(\d+) limits the cache", note)
    assert found is not None
    embedded = run.rollout.embedded.model_copy(update={"kv_cache_bytes": int(found[1])})
    limited = run.model_copy(update={"rollout": run.rollout.model_copy(update={"embedded": embedded})})
    assert check_memory(limited, limit) is None


def test_no_plan_is_made_for_a_run_that_needs_little(check_memory, config: SftRunConfig, need: int, monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr("meshrl.model.costs.run_memory", fail)
    assert check_memory(config, 1000 * need) is None
    with pytest.raises(AssertionError, match="a plan was made"):
        check_memory(config, need)


def test_ranks_on_accelerators_are_planned_with_what_they_need_at_least(config: SftRunConfig, monkeypatch):
    """Without the libraries, and without the cache, which takes what is left."""
    monkeypatch.setattr(memory_check, "device_type", lambda: "cuda")
    (rank,) = plan_memory(config, lambda note: None)
    (expected,) = run_memory(config, None)[1]
    assert rank == expected and rank.least == max(
        rank.total(phase) - rank.device["libraries"].get(phase, 0) for phase in PHASES
    )
    ignoring = config.run.model_copy(update={"ignore_plan": True})
    assert plan_memory(config.model_copy(update={"run": ignoring}), lambda note: None) == ()


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/job", "sys/fs/cgroup/job/memory.max"), ("7:memory:/job", "sys/fs/cgroup/memory/memory.limit_in_bytes")],
)
def test_the_limit_of_a_cgroup_counts_if_it_is_less_than_the_memory(groups: str, file: str, tmp_path: Path):
    limit = tmp_path / file
    limit.parent.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    all_of_it = memory_limit(tmp_path)
    for text, found in (("123456789\n", 123456789), ("max\n", all_of_it), (f"{2**63 - 4096}\n", all_of_it)):
        limit.write_text(text)
        assert memory_limit(tmp_path) == found
