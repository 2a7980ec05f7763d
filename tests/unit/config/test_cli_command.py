"""The command line, mostly in a separate process in which the import of torch fails."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_tokenizers import tiny_tokenizer

import meshrl as meshrl_package
from meshrl.cli import main
from meshrl.config.load import load_run_config

REPOSITORY = Path(__file__).parents[3]
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
MAIN = "from meshrl.cli import main\nsys.exit(main(sys.argv[1:]))"


def meshrl(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + MAIN, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )


def test_help_names_every_command_and_imports_neither_torch_nor_pydantic():
    code = WITHOUT_TORCH + "sys.modules['pydantic'] = sys.modules['yaml'] = None\n" + MAIN
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    for command in ("train", "sft", "eval", "launch", "report", "config"):
        assert f"    {command} " in done.stdout


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_config_error_is_printed_without_torch_and_without_a_traceback(good: Path, command: str):
    done = meshrl(command, "run.yaml", "train.optimizer.lrr=1", folder=good.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "train.optimizer.lrr" in done.stderr and "Nearest: train.optimizer.lr" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_sft_config_error_is_printed_without_torch(good_sft: Path):
    done = meshrl("sft", str(good_sft), "sft.num_steps=0")
    assert done.returncode == 2 and "integer >= 1" in done.stderr and "Traceback" not in done.stderr


def test_the_traceback_of_an_error_shows_on_demand(good: Path):
    done = meshrl("train", str(good), "loop.num_steps=0", MESHRL_TRACEBACK="1")
    assert "Traceback" in done.stderr and "integer >= 1" in done.stderr


def test_unknown_names_of_rewards_and_agents_are_refused(good: Path):
    done = meshrl("train", str(good), "reward.terms.answer.kind=math_anser", "agent.kind=single")
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "Nearest: math_answer" in message and "Nearest: single_turn" in message


def test_a_reward_that_needs_answers_is_refused_without_torch_if_there_are_none(good: Path):
    done = meshrl("train", str(good), "data.answer=null")
    assert done.returncode == 2 and "reward.terms.answer.kind = math_answer" in done.stderr


def test_arguments_that_an_agent_or_reward_does_not_take_are_refused(good: Path):
    done = meshrl("train", str(good), "agent.kind=multi_turn", "agent.args.turns=3")
    assert done.returncode == 2 and "agent.args" in done.stderr and "turns" in done.stderr
    done = meshrl("eval", str(good), "reward.terms.answer={kind: math_answer, args: {rul: exact}}")
    assert done.returncode == 2 and "reward.terms.answer" in done.stderr and "'rul'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.yaml", "loop.num_steps=5", "--explain"],
        ["run.yaml", "--explain", "loop.num_steps=5"],
        ["--explain", "run.yaml", "loop.num_steps=5"],
    ],
)
def test_explain_runs_without_torch_at_every_position_of_the_option(good: Path, arguments: list[str]):
    done = meshrl("train", *arguments, folder=good.parent)
    assert done.returncode == 0, done.stderr
    assert "num_steps: 5" in done.stdout and "# command line" in done.stdout
    assert "6 prompts x 8 samples = 48" in done.stdout


def test_a_server_that_is_not_installed_here_is_an_error_of_the_run_and_a_note_of_explain(good: Path):
    """The config of a cluster is written on a machine that has no vLLM."""
    arguments = ["train", str(good), "rollout.engine=vllm", "rollout.vllm.python=/nowhere/python"]
    assert "/nowhere/python   [command line]\n      no such program" in meshrl(*arguments).stderr
    done = meshrl(*arguments, "--explain")
    assert done.returncode == 0 and "# note: rollout.vllm.python: no such program." in done.stdout, done.stderr


def test_explain_of_sft_runs_without_torch(good_sft: Path):
    done = meshrl("sft", "--explain", str(good_sft))
    assert done.returncode == 0 and "rows_per_step: 16" in done.stdout, done.stderr


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
def test_a_wrong_command_line_is_refused(arguments: list[str], words: str):
    done = meshrl(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_the_version_is_that_of_the_installed_package():
    done = meshrl("--version")
    assert done.returncode == 0 and done.stdout == f"meshrl {version('meshrl')}\n", done.stderr
    assert meshrl_package.__version__ == version("meshrl")


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_config_is_explained_and_a_batch_file_written_where_its_packages_are_missing(
    good: Path, good_sft: Path, sink: str, monkeypatch: pytest.MonkeyPatch
):
    for package in (sink, "ray"):
        monkeypatch.setitem(sys.modules, package, None)  # as for a module that is not installed
    load_run_config(good, [f"monitor.sinks=[{sink}]", "cluster.executor=ray"], starts=False)
    for words in (["sft", str(good_sft), "--explain"], ["launch", "slurm", str(good_sft), "--command", "sft"]):
        assert main([*words, f"monitor.sinks=[{sink}]"]) == 0


def test_eval_takes_its_model_from_the_option(good: Path):
    empty = good.parent / "not: a model"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    done = meshrl("eval", "run.yaml", "--model", empty.name, folder=good.parent)
    assert done.returncode == 2
    assert "model.path = not: a model" in done.stderr.replace('"', "") and "[command line]" in done.stderr
    done = meshrl("eval", "run.yaml", "--model", "no such: folder", folder=good.parent)
    assert done.returncode == 2 and "no such: folder does not exist" in done.stderr


def test_config_lists_and_finds_keys():
    found = meshrl("config", "learning rate")
    assert found.returncode == 0 and "train.optimizer.lr   number > 0 or null   (default null)" in found.stdout
    assert "rollout.sampling.top_p" in meshrl("config").stdout


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m meshrl config | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_failed_run_prints_its_error_and_ends_with_1(good: Path, capsys: pytest.CaptureFixture[str]):
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    with (good.parent / "test.jsonl").open("a") as file:
        file.write("no JSON\n")
    assert main(["eval", str(good)]) == 1
    errors = capsys.readouterr().err
    assert "meshrl: DataError: " in errors and "test.jsonl:2" in errors and "Traceback" not in errors


def test_an_interrupted_run_ends_with_130(good: Path, capsys: pytest.CaptureFixture[str]):
    """The agent's module presses Ctrl-C while the run loads it."""
    tiny_tokenizer().save_pretrained(good.parent / "tiny")
    (good.parent / "stopper.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nAgent = None\n")
    assert main(["eval", str(good), "agent.kind=stopper:Agent"]) == 130
    errors = capsys.readouterr().err
    assert "meshrl: interrupted" in errors and "Traceback" not in errors


def in_shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`meshrl` in a shell command; "$@" is its command line. stdout ends with the exit code of `meshrl`."""
    command = ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", redirection, "sh"]
    command += [sys.executable, "-m", "meshrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "error"),
    [
        ('"$@" >/dev/full; echo $?', ["config"], 1, "meshrl: OutputError: stdout can't be written: No space left"),
        ('"$@" >&-; echo $?', ["config"], 0, ""),
        ('("$@"; echo $? >&2) | true', ["config"], None, "0\n"),
        ('("$@"; echo $? >&2) | true', ["--help"], None, "0\n"),
        ('"$@" 2>/dev/full; echo $?', ["train", "nothing.yaml"], 2, ""),
        ('"$@" 2>&-; echo $?', ["train", "nothing.yaml"], 2, ""),
    ],
)
def test_full_and_closed_outputs_change_the_exit_code_only_if_a_result_is_lost(
    redirection: str, arguments: list[str], code: int | None, error: str
):
    done = in_shell(redirection, *arguments)
    assert done.stdout == ("" if code is None else f"{code}\n")
    assert done.stderr.startswith(error) and (error or not done.stderr) and "Traceback" not in done.stderr


def test_control_characters_of_the_command_line_and_of_config_values_are_escaped(good: Path):
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
