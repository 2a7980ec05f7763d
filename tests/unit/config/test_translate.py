import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from golden import cases, check_case
from published_recipes import shares, translations

from meshrl.cli import main
from meshrl.config.docs import every_key
from meshrl.config.load import PATH_KEYS, WrongConfig, load_run_config
from meshrl.config.other_frameworks import settings
from meshrl.config.schema import locate
from meshrl.core.errors import ConfigError
from meshrl.run.inputs import load_run
from meshrl.tools.translate.command import nested, render, translate_file, translate_settings
from meshrl.tools.translate.read import Code, computed, read_settings
from meshrl.tools.translate.values import RULES

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = {"run.sh": GOLDEN / "recipe_of_verl.sh", "train.py": GOLDEN / "recipe_of_trl.txt"}
TRANSLATED = GOLDEN / "translated.txt"  # framework, name of a script or settings, numbers that the settings lack


@pytest.mark.parametrize("given", [given for given, _ in cases(TRANSLATED)])
def test_a_recipe_is_translated_to_this_config(given: str, tmp_path: Path):
    """A script is read as text, with its variables, and is not run. Units are those of meshrl."""
    framework, there, numbers = json.loads(given)
    if isinstance(there, str):
        (tmp_path / there).write_text(SCRIPTS[there].read_text())
        found, there = read_settings(tmp_path / there)
        assert found == framework
    check_case(TRANSLATED, given, render(translate_settings(framework, there, numbers), "the file"))


def test_a_program_without_settings_is_refused(tmp_path: Path):
    (tmp_path / "train.py").write_text("rows = load().map(lambda row: row)")
    with pytest.raises(ConfigError, match="has no setting of verl, TRL"):
        read_settings(tmp_path / "train.py")


@pytest.mark.parametrize(
    "text", ["'a' * 10**9", "'a' * 999999999", "[0] * 999999999", "'%999999999d' % 1", "n * n", "1 + " * 1000 + "1"]
)
def test_an_expression_that_takes_memory_or_time_stays_code(text: str):
    assert type(computed(text, {"n": 10**15})) is Code
    assert computed(f"2 * 3 if 1 < 2 else {text}", {"n": 10**15}) == 6


LOADED = "def shaped(row): return {'prompt': row['question']}\n" + "rows = load_dataset("
FILES = {"data.path": "a.jsonl", "data.eval_path": "b.jsonl", "data.split": None, "data.eval_split": None}


@pytest.mark.parametrize(
    ("loaded", "train", "held_out", "here"),
    [
        ("'json', data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})", "rows['train']", "rows['test']", FILES),
        ("'json', data_files='a.jsonl', split='train')", "rows", "load_dataset('json', data_files='b.jsonl')", FILES),
        (
            "'json', data_files='a.jsonl', split='train').train_test_split(0.1)",
            "rows['train']",
            "rows['test']",  # not evaluated on the rows of training
            {"data.path": "a.jsonl", "data.eval_path": None},
        ),
        (
            "'org/rows', 'main')\nrows = rows.map(lambda row: {'prompt': row['question']})",
            "rows['train']",
            "rows['test'].map(shaped)",
            {"data.path": "org/rows", "data.subset": "main", "data.eval_path": "org/rows", "data.eval_split": "test"},
        ),
        ("'org/rows', split='all')", "read()", "None", {"data.path": "org/rows", "data.split": "all"}),
    ],
)
def test_rows_are_those_that_the_trainer_gets(loaded: str, train: str, held_out: str, here: dict, tmp_path: Path):
    path = tmp_path / "train.py"
    end = f"\nGRPOTrainer('m', f, args=GRPOConfig('o'), train_dataset={train}, eval_dataset={held_out})"
    path.write_text(
        f"other = load_dataset('x', 'y')\n{LOADED}{loaded}{end}" if train == "rows" else LOADED + loaded + end
    )
    made = translate_settings(*read_settings(path), {"rows": None, "num_processes": 1})
    assert {key: made.here.get(key) for key in here} == here
    assert "PLACEHOLDER" in render(made, "train.py")  # of the reward, which gets lists there


def test_a_translated_config_is_written_once_and_is_explained(write: Callable[..., Path], capfd):
    home = write("").parent
    row = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
    (home / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (home / "my_score.py").write_text("def score(data_source, solution_str, ground_truth): return 1.0")
    script = write(
        f"python3 -m verl.trainer.main_ppo data.train_files={home}/rows.jsonl trainer.total_epochs=3 "
        f"data.train_batch_size=16 {ACTOR}.ppo_mini_batch_size=8 {ROLLOUT}.n=4 "
        f"actor_rollout_ref.model.path={home}/tiny "
        "data.max_prompt_length=64 data.max_response_length=32 trainer.n_gpus_per_node=2 critic.optim.lr=1e-5 a.b=1 "
        f"custom_reward_function.name=score custom_reward_function.path={home}/my_score.py",
        "run.sh",
    )
    out = home / "my.yaml"
    assert main(["translate", str(script), "--out", str(out)]) == 0
    assert "my.yaml --explain" in capfd.readouterr().out
    text = out.read_text()
    assert "num_epochs: 3" in text and "kind: my_score:score" in text and f"module_folder: {home}" in text
    assert "no critic" in text and "critic.optim.lr = 1e-05" in text and "a.b = 1" in text
    assert load_run(out, starts=False).config.loop.num_steps == 12  # 3 x 64 rows / 16
    with pytest.raises(ConfigError, match=r"my\.yaml"):
        translate_file(script, out, None, 1)
    with pytest.raises(ConfigError, match="has no setting of verl, TRL, prime-rl"):
        read_settings(out)


def test_every_setting_of_published_recipes_is_a_key_or_a_comment_with_a_reason():
    for recipe, made in translations().items():
        named = {name for names in made.names.values() for name in names} | made.reasons.keys()
        assert made.there.keys() <= named and all(made.reasons.values()), recipe
        try:
            load_run_config(nested(made.here), starts=False)
        except WrongConfig as error:
            assert all(problem.keys[0] in PATH_KEYS for problem in error.problems), (recipe, str(error))
    assert len(translations()) >= 30
    for framework, least in {"verl": 0.67, "TRL": 0.62, "prime-rl": 0.7}.items():
        _, _, mapped, _, unknown = shares(framework)
        assert mapped >= least and unknown <= 0.02, framework


def test_the_configs_of_the_examples_are_valid_where_their_files_are():
    configs = sorted((ROOT / "examples" / "grpo_trainer" / "config").glob("*.yaml"))
    configs += [ROOT / "examples" / name for name in ("multi_turn/gsm8k.yaml", "sglang_multiturn/multiturn.yaml")]
    for config in (path for path in configs if "sft" not in path.name):
        try:
            load_run_config(config, starts=False)
        except WrongConfig as error:
            assert all(problem.keys[0] in PATH_KEYS for problem in error.problems), str(error)
    assert load_run_config(ROOT / "examples/grpo_trainer/config/dapo.yaml", starts=False).config.rows_per_update == 512


def test_every_row_of_the_table_can_be_translated():
    keys = every_key()
    for setting in settings():
        names = {name for own in setting.names.values() for name in own}
        assert set(setting.defaults) | setting.unwritten <= names and (not setting.rule or setting.rule in RULES), (
            setting
        )
        for result in setting.values.values():
            results = (
                [*result.values()] if isinstance(result, dict) else result if isinstance(result, list) else [result]
            )
            assert isinstance(result, dict) or len(results) <= len(setting.here), setting
            assert not isinstance(result, dict) or all(locate(keys, key)[0] for key in result), setting
            for text in (each for each in results if isinstance(each, str) and each.startswith("=")):
                ast.parse(text[1:].strip(), mode="eval")


def test_names_with_line_breaks_write_no_keys(tmp_path: Path):
    (tmp_path / "a.yaml").write_text('"trainer.x\\nmodel:\\n  path: evil # ": 1\ndata:\n  train_batch_size: 8\n')
    framework, there = read_settings(tmp_path / "a.yaml")
    lines = render(translate_settings(framework, there, {}), "na\nme: 1").splitlines()
    assert not [line for line in lines if "evil" in line and not line.startswith("#")] and "me: 1" not in lines
