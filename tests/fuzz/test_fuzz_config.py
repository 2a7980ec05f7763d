"""Damaged configs are refused with the file's name, or read; the output of --explain, read again, is the same config.

All checks are made before torch is imported, also for files that are not configs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from damage import Damage, of_json, of_place, of_text, rounds_of, written
from outcome import check, findings, limits

from meshrl.cli import main
from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError
from meshrl.plan.explain import explain

CONFIG = """\
base: base.yaml
train:
  optimizer: {lr: 1e-5, betas: [0.9, 0.95]}
data:
  path: rows.jsonl          # twenty of them
  max_prompt_tokens: 64
rollout:
  sampling: {max_new_tokens: 8, temperature: 0.9, stop_token_ids: [1, 2]}
reward:
  terms:
    ascii: {kind: "tiny_run:ascii_share", weight: 0.5}
loop: {num_steps: 2, prompts_per_step: 4, samples_per_prompt: 4}
algo: {loss: ppo_clip, kl: off}
run: {name: fuzzed}
"""
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij")
)
SECTIONS = "a: &a {p: {}, q: {}, r: {}, s: {}, t: {}, u: {}}\n" + "".join(
    f"{name}: &{name} {{{', '.join(f'{key}: *{before}' for key in 'pqrstu')}}}\n"
    for before, name in zip("abcdefghi", "bcdefghij")
)
HOSTILE = {
    "a billion values behind aliases": BOMB,
    "sixty million empty sections behind aliases": SECTIONS,
    "an alias that contains itself": "model: &m {path: *m}\n",
    "an alias that contains itself under an empty key": "&a {'': *a}\n",
    "a thousand lists": "model: " + "[" * 1000,
    "a thousand blocks": "".join(" " * i + "a:\n" for i in range(600)),
    "code to be run": "model: {path: !!python/object/apply:os.system ['touch ran']}\n",
    "an object to be made": "!!python/object:pathlib.Path {}\n",
    "a character beyond Unicode": 'model: {path: "\\U00110000"}\n',
    "a character far beyond Unicode": 'model: {path: "\\UFFFFFFFF"}\n',
    "half a surrogate pair": 'model: {path: "\\ud800"}\n',
    "a NUL in a path": 'model: {path: "a\\0b"}\ndata: {path: "a\\0b/c"}\nrun: {resume: "a\\0b"}\n',
    "a model of 5,000 characters": f"model: {{path: {'x' * 5000}}}\n",
    "rows of 5,000 characters": f"data: {{path: a/{'x' * 5000}, eval_path: {'y' * 300}}}\n",
    "the home of an unknown user": "model: {path: ~no-such-user/model}\n",
    "a base that can't be": 'base: "a\\0b"\n',
    "a base of 5,000 characters": f"base: {'b' * 5000}\n",
    "a version of YAML with digits without end": f"%YAML 1.{'9' * 5000}\n---\nmodel: {{}}\n",
    "two documents": "model: {}\n---\nmodel: {}\n",
    "a key twice": "model: {path: model, path: other}\n",
    "keys that are lists": "? [a, b]\n: 1\n",
    "merge keys": "model: {<<: {path: model}}\n",
    "3,000 unknown keys": "".join(f"key_{i}: 1\n" for i in range(3_000)),
    "20,000 values": f"rollout: {{sampling: {{stop_token_ids: [{'1,' * 20_000}]}}}}\n",
    "a key of 100,000 characters": f"{'k' * 100_000}: 1\n",
    "a value of 100,000 characters": f"model: {{path: {'v' * 100_000}}}\n",
    "an integer of 5,000 digits": f"loop: {{num_steps: {'9' * 5000}}}\n",
    "a number that is infinite": "train: {optimizer: {lr: 1e999}}\n",
    "more than is read": "# " + "x" * 300_000 + "\nmodel: {}\n",
    "a NUL": "model:\0 {}\n",
    "nothing": "",
    "only a comment": "# nothing\n",
    "a tab": "model:\n\tpath: model\n",
}
HUGE = [10**18, 10**98, 1e308, 1e-308, -(10**60)]


@pytest.fixture(scope="module")
def home(tiny: Path) -> Path:
    base = {"model": {"path": "model", "dtype": "float32"}, "train": {"max_tokens_per_microbatch": 160}}
    (tiny / "base.yaml").write_text(json.dumps(base))
    (tiny / "run.yaml").write_text(CONFIG)
    return tiny


def read(folder: Path) -> tuple[dict[str, Any], str]:
    """The config and its explanation. The resolved config, read again, must be the same."""
    loaded = load_run_config(folder / "run.yaml")
    content = loaded.config.model_dump(mode="json")
    again = folder / "again.yaml"
    again.write_text(to_yaml(loaded), encoding="utf-8")
    assert load_run_config(again).config.model_dump(mode="json") == content
    again.unlink()
    return content, explain(loaded)


def same_if_harmless(intact: Path):
    content, _ = read(intact)

    def judge(damage: Damage, value: Any) -> str | None:
        if damage.kind == "place":
            return "was read, although no file is there"
        text = json.dumps(value[0]).replace(f"{intact}-damaged", str(intact))
        return "another config" if damage.kind == "harmless" and json.loads(text) != content else None

    return judge


def test_a_damaged_config_is_refused_by_name_or_explained_consistently(home: Path):
    judge = same_if_harmless(home)
    check(home, "run.yaml", [*of_text(CONFIG.encode(), seed=1), *of_place()], read, judge)
    base = (home / "base.yaml").read_bytes()
    check(home, "base.yaml", [*of_text(base, 2), *of_place()], read, judge, ["base.yaml", "run.yaml"])


def test_hostile_yaml_is_refused_within_seconds_and_runs_nothing(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    damages = [written(what, "content", text.encode()) for what, text in HOSTILE.items()]
    check(home, "run.yaml", damages, read, lambda damage, value: "was read")
    assert not (home / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sft", [False, True])
def test_numbers_of_any_size_are_refused_or_explained(home: Path, sft: bool, capsys: pytest.CaptureFixture[str]):
    """Each number of the config; values that the arithmetic of --explain can't handle must be refused before."""
    from meshrl.config.run import RunConfig, SftRunConfig
    from meshrl.config.schema import all_keys

    numbers = [
        k
        for k, key in all_keys(SftRunConfig if sft else RunConfig).items()
        if "number" in key.allowed or "integer" in key.allowed
    ]
    (home / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    config = ["sft", "model.path=model", "sft.path=chat.jsonl"] if sft else ["train"]
    (home / "empty.yaml").write_text("model: {dtype: float32}\n")
    for key in numbers:
        key = key.replace("NAME", "ascii" if "terms" in key else "one")
        for value in HUGE:
            command = [config[0], str(home / ("empty.yaml" if sft else "run.yaml")), "--explain", *config[1:]]
            with limits():
                assert main([*command, f"{key}={value}"]) in (0, 2), (key, value)
            capsys.readouterr()


def test_a_damaged_config_json_of_the_model_is_reported_by_the_check(home: Path):
    data = (home / "model" / "config.json").read_bytes()
    damages = [*of_json(data, seed=3), *of_place()]
    check(home, "model/config.json", damages, read, named=["config.json", "model.path", "max_position"])


def test_damaged_rows_are_reported_by_the_check(home: Path):
    damages = [*of_text((home / "rows.jsonl").read_bytes(), seed=4), *of_place()]
    check(home, "rows.jsonl", damages, read, named=["rows.jsonl", "data.path"])


def test_the_command_exits_with_2_and_an_error_for_anything_but_a_config_file(
    home: Path, capsys: pytest.CaptureFixture[str]
):
    for damage in of_place():
        copy = home / "odd.yaml"
        copy.write_text("x")
        damage.put(copy)
        with limits():
            assert main(["train", str(copy), "--explain"]) == 2, damage.name
        assert "odd.yaml" in capsys.readouterr().err
        if copy.is_dir():
            copy.rmdir()
        else:
            copy.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_random_mixture_of_lines_is_refused_or_read(home: Path):
    """Lines of the config shuffled, repeated and left out: indentation and duplicate keys of every kind."""
    import random

    damages = []
    for seed in range(rounds_of(60)):
        rng = random.Random(seed)
        lines = CONFIG.splitlines(keepends=True)
        mixed = [rng.choice(lines) for _ in range(rng.randrange(len(lines)))] + lines[: rng.randrange(len(lines))]
        damages.append(written(f"mixture {seed}", "content", "".join(mixed).encode()))
    check(home, "run.yaml", damages, read)


def test_the_harness_reports_other_errors(home: Path):
    """So the checks above can fail: a reader that raises another error, or does not name the file, is a finding."""

    def raises(folder: Path) -> None:
        raise ValueError((folder / "run.yaml").read_text())

    def names_no_file(folder: Path) -> None:
        raise ConfigError("something is wrong")

    damages = list(of_text(CONFIG.encode(), 1))[:2]
    assert len(findings(home, "run.yaml", damages, raises)) == 2
    assert len(findings(home, "run.yaml", damages, names_no_file)) == 2
