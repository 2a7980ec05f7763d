"""The command line, mostly in this process; and in an interpreter in which the import of torch fails."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_tokenizers import tiny_tokenizer

import meshrl as meshrl_package
from meshrl.cli import COMMANDS, main
from meshrl.config.load import load_run_config
from meshrl.core.errors import ConfigError, DataError, EngineEnded
from meshrl.data.datasets import MissingAnswerError

REPOSITORY = Path(__file__).parents[3]
ALL_OF = """
import contextlib, io, json, sys
missing, command_lines = json.loads(sys.stdin.read())
sys.modules.update(dict.fromkeys(missing))
from meshrl.cli import main
results = []
for words in command_lines:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Meshrl = Callable[..., Done]


@pytest.fixture
def meshrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Meshrl:
    """meshrl(*WORDS, folder=...) is one command in this process."""

    def run(*words: str, folder: Path | None = None) -> Done:
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored at the end of the test
        with monkeypatch.context() as there:
            there.chdir(folder or Path.cwd())
            capsys.readouterr()
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return Done(code, *capsys.readouterr())

    return run


def in_one_interpreter(missing: list[str], folder: Path, *command_lines: list[str]) -> list[Done]:
    """The commands one after the other in a new interpreter that can't import the missing packages."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_OF],
        input=json.dumps([missing, command_lines]),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return [Done(*each) for each in json.loads(done.stdout)]


def test_help_names_every_command_and_imports_neither_torch_nor_pydantic(tmp_path: Path):
    missing = ["torch", "transformers", "pydantic", "yaml"]
    (done,) = in_one_interpreter(missing, tmp_path, ["--help"])
    assert done.returncode == 0, done.stderr
    for command in ("train", "sft", "eval", "launch", "report", "config"):
        assert f"    {command} " in done.stdout


def test_the_module_of_the_command_line_runs_as_the_package_does():
    modules = ("meshrl", "meshrl.cli")
    runs = [subprocess.run([sys.executable, "-m", m, "--version"], capture_output=True, text=True) for m in modules]
    assert runs[0].stdout.startswith("meshrl ") and runs[0].stdout == runs[1].stdout


def test_configs_are_checked_and_explained_without_torch(good: Path, good_sft: Path):
    rule = "reward.terms.answer={kind: math_answer, args: {rul: exact}}"
    train = ["train", "run.yaml", "loop.num_steps=5"]
    explained = [[*train[:place], "--explain", *train[place:]] for place in (1, 2, 3)]
    explained.append(["sft", "--explain", str(good_sft)])
    refused = {
        "Nearest: train.optimizer.lr": ["train", "run.yaml", "train.optimizer.lrr=1"],
        "train.optimizer.lrr": ["eval", "run.yaml", "train.optimizer.lrr=1"],
        "integer >= 1": ["sft", str(good_sft), "sft.num_steps=0"],
        "Nearest: math_answer": ["train", "run.yaml", "reward.terms.answer.kind=math_anser", "agent.kind=single"],
        "Nearest: single_turn": ["train", "run.yaml", "agent.kind=single"],
        "reward.terms.answer.kind = math_answer": ["train", "run.yaml", "data.answer=null"],
        "'rul'": ["eval", "run.yaml", rule],
        "turns": ["train", "run.yaml", "agent.kind=multi_turn", "agent.args.turns=3"],
    }
    done = in_one_interpreter(["torch", "transformers"], good.parent, *explained, *refused.values())
    *shown, shown_sft = done[: len(explained)]
    for each in shown:
        assert each.returncode == 0 and "num_steps: 5" in each.stdout and "# command line" in each.stdout, each.stderr
        assert "6 prompts x 8 samples = 48" in each.stdout
    assert shown_sft.returncode == 0 and "rows_per_step: 16" in shown_sft.stdout, shown_sft.stderr
    for words, each in zip(refused, done[len(explained) :]):
        assert each.returncode == 2 and each.stdout == "" and "Traceback" not in each.stderr
        assert words in " ".join(each.stderr.split())


def test_the_traceback_of_an_error_shows_on_demand(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MESHRL_TRACEBACK", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ConfigError) as caught:
        main(["train", str(good), "loop.num_steps=0"])
    sys.excepthook(caught.type, caught.value, caught.tb)  # as the interpreter calls it
    errors = capsys.readouterr().err
    assert "Traceback" in errors and "integer >= 1" in errors


def test_a_server_that_is_not_installed_here_is_an_error_of_the_run_and_a_note_of_explain(meshrl: Meshrl, good: Path):
    """The config of a cluster is written on a machine that has no vLLM."""
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    arguments = ["train", str(good), "rollout.engine=vllm", "rollout.vllm.python=/nowhere/python"]
    assert "/nowhere/python   [command line]\n      no such program" in meshrl(*arguments).stderr
    done = meshrl(*arguments, "--explain")
    assert done.returncode == 0 and "# note: rollout.vllm.python: no such program." in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "run.yaml", "--train.optimizer.lr=1"], "without dashes: key=value"),
        (["train", "run.yaml", "--explan"], "unrecognized arguments: --explan"),
        (["train", "run.yaml", "--explian"], "unrecognized arguments: --explian; did you mean '--explain'?"),
        (["train", "run.yaml", "--explain", "another.yaml"], "unrecognized arguments: another.yaml"),
        (["config", "lr", "a=b"], "unrecognized arguments: a=b"),
        (["train"], "CONFIG"),
        (["trian", "run.yaml"], "'trian' is not a command; the commands are train, sft, eval, "),
        (["trian", "run.yaml"], "; did you mean 'train'?"),
        (["--versoin"], "unrecognized arguments: --versoin; did you mean '--version'?"),
        ([], "\n    train "),
        ([], "usage: meshrl [-h] [--version] COMMAND ..."),
    ],
)
def test_a_wrong_command_line_is_refused(meshrl: Meshrl, arguments: list[str], words: str):
    done = meshrl(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["init {} --model m --data d", "eval my.yaml --out {}", "convert m {}"])
def test_a_folder_that_exists_is_refused_before_slow_imports(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for module in ("meshrl.tools.init", "meshrl.tools.convert", "meshrl.api"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(words.format(tmp_path).split()) == 2
    assert f"{tmp_path} already exists; give the name of a new folder" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(meshrl: Meshrl):
    done = meshrl("--version")
    assert done.returncode == 0 and done.stdout == f"meshrl {version('meshrl')}\n", done.stderr
    assert meshrl_package.__version__ == version("meshrl")


def test_on_windows_each_command_ends_with_one_line(meshrl: Meshrl, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "win32")
    done = meshrl("quickstart")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "run it in WSL" in done.stderr


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_config_is_explained_and_a_batch_file_written_where_its_packages_are_missing(
    good: Path, good_sft: Path, sink: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for package in (sink, "ray"):
        monkeypatch.setitem(sys.modules, package, None)  # as for a module that is not installed
    load_run_config(good, [f"monitor.sinks=[{sink}]", "cluster.executor=ray"], starts=False)
    for words in (["sft", str(good_sft), "--explain"], ["launch", "slurm", str(good_sft), "--command", "sft"]):
        assert main([*words, f"monitor.sinks=[{sink}]"]) == 0
        printed = " ".join("".join(capsys.readouterr()).split())
        assert f"pip install {sink}, or leave it out here." in printed.replace(" # ", " ")


def test_eval_takes_its_model_from_the_option(meshrl: Meshrl, good: Path):
    empty = good.parent / "not: a model"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    done = meshrl("eval", "run.yaml", "--model", empty.name, folder=good.parent)
    assert done.returncode == 2
    assert "model.path = not: a model" in done.stderr.replace('"', "") and "[command line]" in done.stderr
    done = meshrl("eval", "run.yaml", "--model", "no such: folder", folder=good.parent)
    assert done.returncode == 2 and "no such: folder does not exist" in done.stderr


def test_config_lists_and_finds_keys(meshrl: Meshrl):
    found = meshrl("config", "learning rate")
    assert found.returncode == 0 and "train.optimizer.lr   number > 0 or null   (default null)" in found.stdout
    assert "rollout.sampling.top_p" in meshrl("config").stdout


def test_a_failed_run_prints_its_error_and_ends_with_1(meshrl: Meshrl, good: Path):
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    with (good.parent / "test.jsonl").open("a") as file:
        file.write("no JSON\n")
    done = meshrl("eval", str(good))
    assert done.returncode == 1 and "meshrl: DataError: " in done.stderr and "test.jsonl:2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "section"),
    [(DataError, "DataError"), (MissingAnswerError, "DataError"), (EngineEnded, "EngineFailure"), (ConfigError, None)],
)
def test_an_error_ends_with_its_section_of_the_faq(kind, section, monkeypatch, capsys):
    def fails(_: argparse.Namespace) -> None:
        error = kind("no\nluck")
        error.add_note("a note")
        raise error

    monkeypatch.setitem(COMMANDS, "config", (fails, "", []))
    assert main(["config"]) == (1 if section else 2)
    end = [f"See {REPOSITORY / 'docs/faq.md'}, section {section}"] if section else []
    assert capsys.readouterr().err.splitlines()[1:] == ["luck", "a note", *end]
    headings = (REPOSITORY / "docs" / "faq.md").read_text(encoding="utf-8").splitlines()
    assert section is None or any(line.startswith(f"## {section}") for line in headings)


def test_an_interrupted_run_ends_with_130(meshrl: Meshrl, good: Path):
    """The agent's module presses Ctrl-C while the run loads it."""
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    (good.parent / "stopper.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nAgent = None\n")
    done = meshrl("eval", str(good), "agent.kind=stopper:Agent")
    assert done.returncode == 130 and "meshrl: interrupted" in done.stderr and "Traceback" not in done.stderr


SHELL = """
"$@" config >/dev/full; echo $?
"$@" config >&-; echo $?
("$@" config; echo $? >&2) | true
"$@" train nothing.yaml 2>/dev/full; echo $?
"$@" train nothing.yaml 2>&-; echo $?
"""


def test_full_and_closed_outputs_change_the_exit_code_only_if_a_result_is_lost():
    command = ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", SHELL, "sh", sys.executable, "-m", "meshrl"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["1", "0", "2", "2"]
    error, section, code = done.stderr.splitlines()
    assert error.startswith("meshrl: OutputError: stdout can't be written: No space left") and code == "0"
    assert section == f"See {REPOSITORY / 'docs/faq.md'}, section OutputError"


def test_control_characters_of_the_command_line_and_of_config_values_are_escaped(meshrl: Meshrl, good: Path):
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    for arguments in (
        ["train", str(good), r'run.name="a/\x1b[2J\x9b\u202e"', r'data.path="\x1b[2J"', "train.\x1b[2J=1"],
        ["train", "\x1b[2J\x9b\u202e.yaml"],
        ["train", str(good), "--\x1b[2J\x9b\u202e"],
        ["train", str(good), "--explain", r'run.name="\x1b[2J\x9b\u202e"'],
    ):
        done = meshrl(*arguments)
        printed = done.stdout + done.stderr
        assert done.returncode == (0 if "--explain" in arguments else 2), printed
        assert not {"\x1b", "\x9b", "\u202e"} & set(printed) and "[2J" in printed and r"\u202e" in printed, arguments
