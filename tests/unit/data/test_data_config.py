"""The config's check reports faults of the data keys, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from golden import cases, check_case

from meshrl.config.explain import to_yaml
from meshrl.config.kinds import REWARDS
from meshrl.config.load import load_run_config, load_sft_config
from meshrl.core.errors import ConfigError
from meshrl.data.check import check_data, count_rows
from meshrl.plan.explain import explain

ROW = {"question": "1+1=", "answer": "2", "info": {"level": 3}}
BASE = """\
model: {path: organisation/name}
loop: {num_steps: 4, prompts_per_step: 2}
data:
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with one data set of each kind."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    home = tmp_path_factory.mktemp("home")
    (home / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 30)
    (home / "empty.jsonl").write_text("\n")
    (home / "list.jsonl").write_text("[1, 2]\n")
    pq.write_table(pa.Table.from_pylist([ROW]).slice(1), home / "empty.parquet")
    (home / "disguised.jsonl").write_bytes(b"PAR1....")
    pq.write_table(pa.Table.from_pylist([ROW] * 20), home / "train.parquet")
    one = datasets.Dataset.from_list([ROW] * 3)
    one.save_to_disk(home / "saved")
    datasets.DatasetDict(train=one, test=one).save_to_disk(home / "splits")
    for kind in ("jsonl", "parquet"):
        (home / "shards" / kind).mkdir(parents=True)
        for i in range(2):
            source = home / f"train.{kind}"
            (home / "shards" / kind / f"{i}.{kind}").write_bytes(source.read_bytes())
    (home / "shards" / "mixed").mkdir()
    for kind in ("jsonl", "parquet"):
        (home / "shards" / "mixed" / f"0.{kind}").write_bytes((home / f"train.{kind}").read_bytes())
    return home


def load(home, data, purpose="train", known=None, overrides=()):
    path = home / "run.yaml"
    path.write_text(BASE + "".join(f"  {line}\n" for line in data))
    return load_run_config(path, overrides, known, purpose, further=[check_data])


GOOD = [
    ["path: train.jsonl"],
    ["path: train.jsonl", "format: jsonl"],
    ["path: train.jsonl", "answer: info.level"],
    ["path: train.parquet", "answer: info.level"],
    ["path: saved", "answer: info.level"],
    ["path: splits", "split: train", "eval_path: splits", "eval_split: test"],
    ["path: shards/jsonl"],
    ["path: shards/parquet"],
    ["path: shards/mixed", "format: parquet"],
    ["path: openai/gsm8k", "subset: main", "split: train", "eval_path: train.jsonl"],
    ["path: train.jsonl", "map: json:loads"],
    ["path: train.jsonl", "streaming: true"],
    ["sources: {a: {path: train.jsonl, weight: 2}, b: {path: splits, split: test, answer: info.level}}"],
]


@pytest.mark.parametrize("data", GOOD, ids=" ".join)
def test_a_valid_data_section_is_accepted_and_loads_again_when_written_out(home, data):
    loaded = load(home, data)
    again = home / "again.yaml"
    again.write_text(to_yaml(loaded))
    assert load_run_config(again).config == loaded.config
    shown(loaded)


REFUSED = Path(__file__).parent / "golden" / "refused.txt"  # the lines of data


@pytest.mark.parametrize("given", [given for given, _ in cases(REFUSED)])
def test_a_wrong_data_section_is_refused_with_this_error(home, given):
    with pytest.raises(ConfigError) as error:
        load(home, json.loads(given))
    check_case(REFUSED, given, str(error.value), home=home, here=Path.cwd())


def test_a_split_without_effect_does_not_hide_a_missing_column(home):
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*only Hugging Face data sets have splits.*no column 'q'"):
        load(home, ["path: train.jsonl", "split: train", "prompt: q"])


KNOWN = {"reward": set(REWARDS)}
FORM = "reward.terms={form: {kind: format, args: {regex: x}}}"
MIXED = "sources: {a: {path: train.jsonl, answer: answer}, b: {path: train.jsonl}}"


@pytest.mark.parametrize(
    ("data", "overrides", "keys"),
    [
        (["path: train.jsonl", "answer: null"], [], ["data.answer = null"]),
        (["path: organisation/set", "split: train", "answer: null"], [], ["data.answer = null"]),
        (["sources: {a: {path: train.jsonl}}", "answer: null"], [], ["data.sources.a.answer = null"]),
        ([MIXED, "answer: null"], [], ["data.sources.b.answer = null"]),
        (
            ["path: train.jsonl", "answer: null"],
            ["reward.terms={x: {kind: format, args: {regex: x}}, y: {kind: math_answer, weight: 0.1}}"],
            ["reward.terms.y.kind = math_answer [command line]"],
        ),
        (
            ["path: train.jsonl", "answer: null"],
            ["reward.terms={x: {kind: 'meshrl.reward.math_answer:math_answer'}}"],
            ["reward.terms.x.kind = meshrl.reward.math_answer:math_answer"],
        ),
    ],
)
def test_a_reward_that_compares_with_the_answer_is_refused_where_no_column_has_one(home, data, overrides, keys):
    """Every completion would be compared with the text None, and the run would silently learn nothing."""
    with pytest.raises(ConfigError) as error:
        load(home, data, known=KNOWN, overrides=overrides)
    message = " ".join(str(error.value).split())
    assert "1 problem " in message and "null names no column for it. Name the column with the ground truth" in message
    for key in ["data.answer = null [run.yaml:", *keys]:
        assert key in message
    assert "data.sources.a.answer" not in message or "data.sources.a.answer = null" in keys


@pytest.mark.parametrize(
    ("data", "overrides"),
    [
        (["path: train.jsonl", "answer: null"], [FORM]),
        (["path: train.jsonl", "answer: null"], ["reward.terms={x: {kind: 'json:loads'}}"]),  # it may not use it
        (["path: train.jsonl", "answer: null", "map: json:loads"], []),
        (["sources: {a: {path: train.jsonl, map: json:loads}}", "answer: null"], []),
        (["sources: {a: {path: train.jsonl, answer: answer}}", "answer: null"], []),
    ],
)
def test_null_for_the_answer_is_accepted_if_no_reward_needs_it_or_another_key_names_it(home, data, overrides):
    load(home, data, known=KNOWN, overrides=overrides)


def test_an_evaluation_reads_answers_by_the_same_rule(home):
    data = ["sources: {a: {path: train.jsonl, answer: answer}}", "answer: null", "eval_path: train.jsonl"]
    for purpose in ("train", "eval"):
        with pytest.raises(ConfigError, match=r"data\.answer = null"):
            load(home, data, purpose, KNOWN)
    load(home, data, "eval", KNOWN, [FORM])


def test_an_evaluation_needs_no_training_rows(home):
    load(home, ["path: gone.jsonl", "eval_path: train.jsonl"], purpose="eval")
    load(home, ["eval_path: train.jsonl"], purpose="eval")


def shown(loaded):
    return explain(loaded, count_rows(loaded.config))


def test_explain_counts_rows_where_that_is_cheap_and_shows_the_shares_of_a_mixture(home):
    assert "of 20 rows" in shown(load(home, ["path: train.parquet"]))
    assert "of 60 rows" in shown(load(home, ["path: shards/jsonl"]))
    text = shown(load(home, ["sources: {a: {path: train.jsonl, weight: 3}, b: {path: train.parquet}}"]))
    assert "a 75.0%, b 25.0%" in text and "passes" not in text


def test_paths_of_a_mixture_are_made_absolute_and_can_be_overridden(home):
    load(home, ["sources: {a: {path: train.jsonl}}"])
    config = load_run_config(home / "run.yaml", ["data.sources.a.weight=2", "data.sources.b.path=train.parquet"]).config
    assert {name: (s.path, s.weight) for name, s in config.data.sources.items()} == {
        "a": (str(home / "train.jsonl"), 2.0),
        "b": (str(home / "train.parquet"), 1.0),
    }


def test_sft_rows_may_be_parquet(home):
    path = home / "sft.yaml"
    path.write_text("model: {path: organisation/name}\nsft: {path: train.parquet, num_steps: 1, messages: info}\n")
    assert load_sft_config(path, further=[check_data]).config.sft.path == str(home / "train.parquet")
    with pytest.raises(ConfigError, match="no column 'chat'"):
        load_sft_config(path, ["sft.messages=chat"], further=[check_data])


def test_sft_rows_may_be_one_split_of_a_data_set(home):
    path = home / "sft.yaml"
    path.write_text("model: {path: organisation/name}\nsft: {path: splits, num_steps: 1, messages: info}\n")
    with pytest.raises(ConfigError, match=r"(?s)sft\.path.*the splits train, test.*must\s+name one"):
        load_sft_config(path, further=[check_data])
    loaded = load_sft_config(path, ["sft.split=test"], further=[check_data])
    assert loaded.config.sft.split == "test" and count_rows(loaded.config) == 3
    with pytest.raises(ConfigError, match=r"(?s)sft\.split.*only Hugging Face data sets have splits"):
        load_sft_config(path, ["sft.path=train.jsonl", "sft.split=test"], further=[check_data])
    with pytest.raises(ConfigError, match=r"(?s)sft\.subset.*on the Hugging Face hub have subsets"):
        load_sft_config(path, ["sft.split=test", "sft.subset=main"], further=[check_data])


def test_checks_of_every_kind_of_set_need_no_torch(home):
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from meshrl.config.load import load_run_config\n"
        "from meshrl.data.check import check_data\n"
        "for data in ('train.parquet', 'saved', 'train.jsonl'):\n"
        f"    load_run_config({str(home / 'plain.yaml')!r}, [f'data.path={{data}}'], further=[check_data])\n"
        "assert not [name for name in ('torch', 'transformers') if sys.modules[name]]\n"
    )
    (home / "plain.yaml").write_text(BASE.replace("data:", "data: {path: train.jsonl}"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
