import json
import shutil
from pathlib import Path

import pytest

from meshrl.config.algo import CorrectionConfig
from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config, load_sft_config
from meshrl.config.values import scalar, show
from meshrl.core.errors import ConfigError
from meshrl.plan.explain import explain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2E+3", -2000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0", 0),
        ("off", False),
        ("Yes", True),
        ("~", None),
        ("", None),
        ("007", "007"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("nan", "nan"),
        (".inf", ".inf"),
    ],
)
def test_unquoted_scalars_have_the_expected_values(text: str, value: object):
    read = scalar(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        "off",
        "1e-6",
        "null",
        "",
        " padded ",
        "a: b",
        "- a",
        "-",
        "a #b",
        "x:",
        'say "hi"\n\tüß 😀',
        "\u2028\x7f\x85",
        "~/models/x",
        "{a}",
        [1, "2", None, [True]],
        {"a b": {"c": "no"}},
        1e-7,
        3,
        2.0,
        True,
        None,
    ],
)
def test_a_shown_value_reads_back_as_itself(good: Path, value: object):
    loaded = load_run_config(good, [f"agent.args.x={show(value)}"])
    assert loaded.config.agent.args == {"x": value}


def test_numbers_without_a_dot_are_numbers_in_file_and_override(good: Path):
    """YAML 1.1 reads 1e-5 as text."""
    assert load_run_config(good).config.train.optimizer.lr == 1e-5
    assert load_run_config(good, ["train.optimizer.lr=3e-6"]).config.train.optimizer.lr == 3e-6


def test_overrides_take_lists_mappings_and_null_and_the_last_one_wins(good: Path):
    config = load_run_config(
        good,
        [
            "rollout.sampling.stop_token_ids=[3, 5]",
            "agent.args={turns: 4, tools: [a]}",
            "agent.args.turns=5",
            "data.answer=null",
            "reward.terms.answer.kind=json:dumps",
            "loop.num_steps=7",
            "loop.num_steps=9",
            "data.system='Answer: yes or no'",
        ],
    ).config
    assert config.rollout.sampling.stop_token_ids == [3, 5]
    assert config.agent.args == {"turns": 5, "tools": ["a"]}
    assert config.data.answer is None
    assert config.loop.num_steps == 9
    assert config.data.system == "Answer: yes or no"


def test_origins_name_line_and_file_command_line_or_default(good: Path):
    origins = load_run_config(good, ["loop.num_steps=3", "reward.terms.answer.kind=math_answer"]).origins
    assert origins["model.path"] == "run.yaml:2"
    assert origins["train.optimizer.lr"] == "run.yaml:4"
    assert origins["rollout.sampling.max_new_tokens"] == "run.yaml:11"
    assert origins["loop.num_steps"] == "command line"
    assert origins["reward.terms.answer.kind"] == "command line"
    assert origins["reward.terms.answer.weight"] == "default"
    assert origins["train.mesh.dp_shard"] == "default, from -1"
    assert origins["rollout.sampling.stop_token_ids"] == "default"


def test_a_base_is_merged_below_the_file_and_keeps_its_origins(write, good: Path):
    child = write(
        "base: ../run.yaml\ntrain:\n  optimizer: {betas: [0.8, 0.9]}\nloop:\n  num_steps: 5\n",
        "more/child.yaml",
    )
    grandchild = write("base: child.yaml\nloop: {num_steps: 6}\n", "more/grandchild.yaml")
    loaded = load_run_config(grandchild, ["train.optimizer.eps=1e-7"])
    optimizer = loaded.config.train.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (1e-5, (0.8, 0.9), 1e-7)
    assert loaded.config.loop.num_steps == 6
    assert loaded.origins["train.optimizer.lr"] == "../run.yaml:4"
    assert loaded.origins["train.optimizer.betas"] == "child.yaml:3"
    assert loaded.origins["loop.num_steps"] == "grandchild.yaml:2"
    # A relative path in a base file starts at the base file.
    assert loaded.config.data.path == str(good.parent / "train.jsonl")
    assert child.parent != good.parent


def test_bases_that_form_a_cycle_or_do_not_exist_are_refused(write):
    write("base: b.yaml\n", "a.yaml")
    ring = write("base: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="leads back"):
        load_run_config(ring)
    with pytest.raises(ConfigError, match=r"'c.yaml' not found.*in the folder of this file"):
        load_run_config(write("base: c.yaml\n", "d.yaml"))
    with pytest.raises(ConfigError, match="name of one config file"):
        load_run_config(write("base: [a, b]\n", "e.yaml"))


def test_short_forms_are_written_out(good: Path):
    config = load_run_config(
        good, ["algo.loss=ppo_clip", "algo.kl=off", "algo.correction=off", "model.lora=off", "train="]
    ).config
    assert config.algo.loss.kind == "ppo_clip"
    assert config.algo.kl.coef == 0
    assert config.algo.correction == CorrectionConfig(kind="off")
    assert config.model.lora.enabled is False
    assert config.train.optimizer.lr == 1e-5, "an empty section takes nothing away"


def test_a_short_form_replaces_the_section_of_the_file_below(write, good: Path):
    path = write("base: run.yaml\nalgo:\n  kl: {coef: 0.1, estimator: k2}\n", "kl.yaml")
    assert load_run_config(path, ["algo.kl.coef=0.2"]).config.algo.kl.estimator == "k2"
    off = load_run_config(path, ["algo.kl=off"])
    assert (off.config.algo.kl.coef, off.config.algo.kl.estimator) == (0.0, "k3")
    assert off.origins["algo.kl.coef"] == "command line"


def test_relative_paths_start_at_the_config_file_then_at_the_working_folder(good: Path):
    here = Path.cwd()
    (here / "other.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (here / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    judge = "reward.terms.quality={kind: judge, args: {calibration: train.jsonl}}"  # a path among free arguments
    config = load_run_config(good, ["data.eval_path=other.jsonl", judge]).config
    assert config.reward.terms["quality"].args["calibration"] == config.data.path
    assert config.data.path == str(good.parent / "train.jsonl"), "both folders have one; the config file's counts"
    assert config.data.eval_path == str(here / "other.jsonl")
    assert config.model.path == str(good.parent / "tiny")


def test_a_hub_id_stays_as_it_is(good: Path):
    assert load_run_config(good, ["model.path=Qwen/Qwen2.5-0.5B"]).config.model.path == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ([], (1, 2)),
        (["cluster.num_train_ranks=8", "train.sharding_strategy=SHARD_GRAD_OP"], (1, 8)),
        (["cluster.num_train_ranks=8", "train.sharding_strategy=HYBRID_SHARD", "train.mesh.dp_replicate=2"], (2, 4)),
        (["train.sharding_strategy=NO_SHARD"], (2, 1)),
        (["train.sharding_strategy=NO_SHARD", "train.mesh.dp_replicate=2", "train.mesh.dp_shard=1"], (2, 1)),
    ],
)
def test_the_mesh_is_written_out(good: Path, overrides: list[str], shape: tuple[int, int]):
    mesh = load_run_config(good, overrides).config.train.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == shape


def test_both_names_of_the_tensor_parallel_size_may_be_given_when_they_agree(good: Path):
    config = load_run_config(good, ["train.tensor_model_parallel_size=1", "train.mesh.tp=1"]).config
    assert config.train.mesh.tp == 1


def test_the_resolved_config_loads_to_the_same_config(write, good: Path, good_sft: Path):
    loaded = load_run_config(
        good,
        ["algo.advantage=rloo", "data.system='off\n: #'", "reward.terms.a-b={kind: 'json:dumps', args: {k: [1]}}"],
    )
    again = load_run_config(write(to_yaml(loaded), "resolved.yaml"))
    assert again.config == loaded.config
    sft = load_sft_config(good_sft, ["train.optimizer.lr=3e-4"])
    assert load_sft_config(write(to_yaml(sft), "resolved_sft.yaml")).config == sft.config


def test_transformers_name_of_flash_attention_is_another_name_of_flash(good: Path):
    loaded = load_run_config(good, ["model={dtype: float32, attn_implementation: flash_attention_2}"])
    assert loaded.config.model.attn_implementation == "flash"
    assert loaded.notices == load_run_config(good, ["model.dtype=float32"]).notices == ()


def test_a_row_above_the_token_budget_gives_a_notice(good: Path):
    notices = load_run_config(good, ["train.max_tokens_per_microbatch=100"]).notices
    assert any("128 tokens" in notice and "= 100" in notice for notice in notices)


def test_the_default_learning_rate_follows_the_command_and_lora(good: Path, good_sft: Path):
    """A value that is set is used."""
    lora, unset = "model.lora={enabled: true, rank: 4}", "train.optimizer.lr=null"
    for load, path, overrides, lr in (
        (load_run_config, good, [unset], 1e-6),
        (load_run_config, good, [unset, lora], 1e-5),
        (load_sft_config, good_sft, [unset], 1e-5),
        (load_sft_config, good_sft, [unset, lora], 1e-4),
        (load_sft_config, good_sft, [lora, "train.optimizer.lr=3e-5"], 3e-5),
    ):
        loaded = load(path, overrides)
        assert loaded.config.peak_lr == pytest.approx(lr)
        (line,) = [line for line in explain(loaded).splitlines() if line.startswith("    lr: ")]
        assert float(line.split()[1]) == lr and ("# decided: the default of" in line) == (lr != 3e-5)


def test_rows_longer_than_the_positions_are_refused_by_either_name_of_their_number(good: Path):
    (good.parent / "tiny" / "config.json").write_text('{"model_type": "gptj", "n_positions": 64}')
    with pytest.raises(ConfigError, match="positions for 64") as error:
        load_run_config(good)
    assert "longrope" not in str(error.value)


@pytest.mark.parametrize(
    ("room", "overrides", "lengths"),
    [
        (1024, [], (768, 256)),
        (300, [], (150, 150)),
        (1280, [], (1024, 256)),
        (1024, ["rollout.sampling.max_new_tokens=100"], (924, 100)),
        (1024, ["data.max_prompt_tokens=1000"], (1000, 24)),
        (1024, ["data.max_prompt_tokens=1024"], None),
        (1024, ["data.max_prompt_tokens=1000", "rollout.sampling.max_new_tokens=25"], None),
    ],
)
def test_default_lengths_fit_into_the_model_and_given_ones_are_refused(good: Path, room, overrides, lengths):
    without = [line for line in good.read_text().splitlines() if "_tokens" not in line]
    good.write_text("\n".join(line.replace("  sampling:", "  sampling: {}") for line in without))
    (good.parent / "tiny" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": room}))
    if lengths is None:
        with pytest.raises(ConfigError, match=f"positions for {room}"):
            load_run_config(good, overrides)
        return
    loaded = load_run_config(good, overrides)
    assert (loaded.config.data.max_prompt_tokens, loaded.config.rollout.sampling.max_new_tokens) == lengths
    changed = [line for line in explain(loaded).splitlines() if "no positions for longer rows" in line]
    assert len(changed) == 2 - (lengths[1] in (256, 100)) - (lengths[0] in (1024, 1000))


def test_a_loss_or_a_reward_that_changes_nothing_gives_a_notice(good: Path):
    def notes(*overrides: str) -> list[str]:
        return [n for n in load_run_config(good, [*overrides]).notices if "no effect" in n or "always 0" in n]

    averaged = "algo.aggregation=seq_mean_token_mean"
    (note,) = notes("algo.loss=gspo", averaged)
    assert note.startswith("algo.loss.kind = gspo has no effect: train.updates_per_step is 1")
    assert notes("algo.loss=gspo", averaged, "train.updates_per_step=2") == notes() == []
    term = "reward.terms.long={{kind: overlong, args: {{max_tokens: {}, buffer_tokens: 4}}}}"
    reached = "rollout.sampling.max_new_tokens=16"
    (note,) = notes(term.format(20), reached)
    assert note.startswith("reward.terms.long is always 0: ") and "= 16 tokens" in note
    assert notes(term.format(19), reached) == []


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("runs/first", "runs/first/checkpoints/step_1000000/model"),
        ("runs/first/checkpoints", "runs/first/checkpoints/step_1000000/model"),
        ("runs/first/checkpoints/step_000200", "runs/first/checkpoints/step_000200/model"),
        ("runs/best", "runs/best/checkpoints/step_000007/model"),
    ],
)
def test_the_folder_of_a_run_in_place_of_a_model_names_its_best_or_newest_model(good: Path, given: str, model: str):
    checkpoints = good.parent / "runs" / "first" / "checkpoints"
    for step in (200, 999_999, 1_000_000):
        (checkpoints / f"step_{step:06d}").mkdir(parents=True)
        shutil.copytree(good.parent / "tiny", checkpoints / f"step_{step:06d}" / "model")
    (checkpoints / "step_1000001" / "state").mkdir(parents=True)  # a checkpoint without a model
    best = good.parent / "runs" / "best" / "checkpoints"
    shutil.copytree(checkpoints / "step_000200", best / "step_000007")
    shutil.copytree(checkpoints / "step_000200", best / "step_000009")
    (best / "best.json").write_text(json.dumps({"step": 7, "score": 0.5, "model": "step_000007/model"}))
    loaded = load_run_config(good, [f"model.path={given}"])
    assert loaded.config.model.path == str((good.parent / model).resolve())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{}", "best.json is damaged"),
        ('{"step": 0, "score": 1, "model": "organisation/name"}', "organisation/name, which"),
    ],
)
def test_a_run_whose_best_model_is_no_folder_is_refused(good: Path, record: str, words: str):
    folder = good.parent / "runs" / "first" / "checkpoints"
    shutil.copytree(good.parent / "tiny", folder / "step_000002" / "model")
    (folder / "best.json").write_text(record)
    with pytest.raises(ConfigError, match=words):
        load_run_config(good, ["model.path=runs/first"])
