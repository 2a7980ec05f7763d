"""What null and auto mean is decided in one table, and --explain shows no null that the run decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshrl.config.docs import every_key
from meshrl.config.load import Loaded, load_run_config, load_sft_config
from meshrl.config.run import RunConfig
from meshrl.plan.decisions import Machine, ModelNumbers
from meshrl.plan.explain import BY_RULE, explain
from meshrl.plan.run_plan import make_plan

NUMBERS = ModelNumbers(num_positions=4096, vocab_size=64, hidden_size=32, intermediate_size=None, num_layers=2)
CPU, GPU = Machine("cpu"), Machine("cuda")

# null or auto of these keys is a value of its own: none, all, or what the model or the files have
OTHER_NULLS = {
    "algo": "correction.low correction.rejection.high correction.rejection.low loss.dual_clip",
    "data": "answer chat_template eval_by eval_fraction eval_limit eval_path eval_split format images map path split "
    "subset system tools",
    "data.sources.NAME": "answer format map prompt split subset",
    "data.eval_sets.NAME": "answer format map prompt samples split subset",
    "data.eval_sets.NAME.sampling": "max_new_tokens min_p repetition_penalty temperature top_k top_p",
    "loop": "num_epochs",
    "model": "router_dtype",
    "monitor": "wandb_project",
    "reward.terms.NAME": "envs",
    "rollout": "endpoint.api_key_env endpoint.url sglang.api_key_env sglang.url",
    "run": "keep_models module_folder",
    "sft": "images chat_template eval_fraction eval_path eval_split format num_epochs prompt split subset system tools",
}
OTHERS = {f"{section}.{name}" for section, names in OTHER_NULLS.items() for name in names.split()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    return tmp_path


def load(folder: Path, *overrides: str) -> Loaded[RunConfig]:
    content = {
        "model": {"path": "some/model"},
        "data": {"path": str(folder / "rows.jsonl")},
        "reward": {"terms": {"right": {"kind": "exact"}}},
        "loop": {"num_steps": 3},
    }
    return load_run_config(content, overrides, starts=False)


def test_every_key_that_may_be_null_or_auto_is_decided_or_is_a_value_of_its_own(folder: Path):
    sft = {"model": {"path": "some/model"}, "sft": {"path": str(folder / "rows.jsonl"), "num_steps": 2}}
    decided: set[str] = set()
    for config in (load(folder).config, load_sft_config(sft, starts=False).config):
        decided |= make_plan(config, NUMBERS, CPU).decisions.keys()
    optional = {key for key, each in every_key().items() if re.search(r"\bnull\b|\bauto\b", each.allowed)}
    assert sorted(optional - OTHERS) == sorted(decided & optional)
    assert decided - optional == {"run.name"}, "whose auto is text"


@pytest.mark.parametrize("machine", [Machine(), CPU, GPU], ids=["unknown", "cpu", "cuda"])
def test_explain_shows_no_null_that_the_run_decides_and_is_a_config_of_the_same_run(folder: Path, machine: Machine):
    evaluates = f"data.eval_path={folder}/rows.jsonl"
    loaded = load(
        folder, evaluates, "loop.eval_samples=4", "loop.max_replaced_groups=2", "algo.aggregation=constant_length"
    )
    run_plan = make_plan(loaded.config, NUMBERS, machine)
    text = explain(loaded, run_plan=run_plan)
    used = [line.strip() for line in text.splitlines() if "# unused" not in line]
    nulls = {line.split(":")[0] for line in used if re.match(r"#? ?\w+: (null|auto) ", line)}
    assert nulls <= {key.rpartition(".")[2] for key in OTHERS}
    (folder / "again.yaml").write_text(text)
    written = load_run_config(folder / "again.yaml", starts=False).config
    assert make_plan(written, NUMBERS, machine).config == run_plan.config


def test_a_decision_of_the_machine_is_a_comment_and_others_are_values(folder: Path):
    loaded = load(folder)
    for machine, kind in ((CPU, '"off"'), (GPU, "truncate"), (Machine(), BY_RULE)):
        text = " ".join(explain(loaded, run_plan=make_plan(loaded.config, NUMBERS, machine)).split())
        assert f"# kind: {kind} # here: off on a CPU, else truncate" in text
        assert "max_context_tokens: 4096 # decided: the model's positions" in text
        assert "tensor_model_parallel_size: 1 # decided: train.mesh.tp" in text


def test_samplers_that_share_an_accelerator_release_their_memory(folder: Path):
    def released(machine: Machine, *overrides: str) -> bool | None:
        config = make_plan(load(folder, *overrides).config, NUMBERS, machine).config
        assert isinstance(config, RunConfig)
        return config.rollout.release_memory

    assert (released(CPU), released(GPU), released(Machine())) == (False, True, None)
    for override in ("cluster.num_rollout_ranks=1", "rollout.sync_mode=delta", "rollout.release_memory=false"):
        assert [released(machine, override) for machine in (CPU, GPU, Machine())] == [False] * 3


def test_what_follows_from_a_model_that_can_not_be_read_is_left_open(folder: Path):
    config = make_plan(load(folder).config, None, CPU).config
    assert isinstance(config, RunConfig)
    assert config.train.max_tokens_per_microbatch is config.rollout.max_context_tokens is None


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("cluster.num_train_ranks=1", "0 train and sample"),
        ("cluster.num_train_ranks=2", "0 to 1 train and sample"),
        ("cluster.num_train_ranks=2 cluster.num_rollout_ranks=1", "0 to 1 train, 2 sample"),
        (
            "rollout.engine=vllm rollout.mesh.infer_tp=2 cluster.num_rollout_ranks=4",
            "0 train, 1 to 4 sample (2 samplers)",
        ),
        (
            "cluster.executor=ray cluster.nodes=2 cluster.num_train_ranks=8",
            "0 to 3 train and sample on machine 0, 4 to 7 train and sample on machine 1",
        ),
    ],
)
def test_explain_shows_what_each_rank_does(folder: Path, overrides: str, text: str):
    lines = explain(load(folder, *overrides.split())).splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("# ranks ")] == [text]


def test_the_specs_of_the_ranks_agree_with_the_plan(folder: Path):
    """For an evaluation, too, where the train ranks sample, on fewer machines if they can't be divided."""
    config = load(folder, "cluster.executor=ray", "cluster.nodes=2", "cluster.num_train_ranks=4").config
    for num_ranks in ((4, 0), (0, 4), (0, 3), (2, 2)):
        ranks = make_plan(config, None, num_ranks=num_ranks).ranks
        assert [own.samples for own in ranks] == [own.trains == (num_ranks[1] == 0) for own in ranks]
        assert ranks[-1].machine == (0 if sum(num_ranks) == 3 else 1)
        assert [own.coordinates is not None for own in ranks] == [own.trains for own in ranks]
