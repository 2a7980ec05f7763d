"""The command line. Only the standard library is imported here, so that `--help` and config errors appear at once.

Exit codes: 0 done, 1 the run failed, 2 the config or the command line is wrong, 130 ended by Ctrl-C, 143 by SIGTERM,
140 by SIGUSR2, 129 by SIGHUP, which a lost terminal sends.
MESHRL_TRACEBACK=1 also prints the traceback of errors; by default only the message is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from meshrl.cli_options import (
    CHAT,
    CONVERT,
    DIAGNOSE,
    DOCTOR,
    EVAL,
    EXPORT,
    INIT,
    LAUNCH,
    MEMORY_PLAN,
    PAGE,
    QUICKSTART,
    REPLAY,
    RUN,
    RUNS,
    SERVE,
    TRAIN,
    TRANSLATE,
    VIEW,
    Argument,
    arg,
)
from meshrl.core.errors import ConfigError, MeshrlError
from meshrl.core.lookup import did_you_mean
from meshrl.core.terminal import drop_unwritten_output, open_standard_streams, print_message, print_output, printable

DESCRIPTION = "Reinforcement-learning post-training of language models on PyTorch FSDP2."
EPILOG = "example: meshrl train gsm8k.yaml train.optimizer.lr=1e-6 --explain"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, which does not depend on stdout and stderr being open, except for a
    command whose result could not be printed."""
    open_standard_streams()
    if sys.platform == "win32":
        print_message("meshrl: Windows has no fork and no flock, which meshrl needs; run it in WSL, or on Linux")
        return 2
    sys.excepthook = _print_traceback
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
        return int(args.command(args) or 0)
    except MeshrlError as e:
        if os.environ.get("MESHRL_TRACEBACK") == "1":
            raise
        family = next((each for each in type(e).__mro__ if each.__base__ is MeshrlError), ConfigError)
        name, further = "", getattr(e, "__notes__", [])
        if family is not ConfigError:  # the text of which has all that its section has
            section = f"See {_installed('docs/faq.md')}, section {family.__name__}"
            name, further = f"{type(e).__name__}: ", [*further, section]
        print_message("\n".join([f"meshrl: {name}{e}", *further]))
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        print_message("meshrl: interrupted")
        return 130
    finally:
        drop_unwritten_output()


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_message("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def _installed(name: str) -> str:
    """The absolute path of a file that is installed with the package; `name`, if it is missing."""
    import sysconfig

    # A clone has it next to the package, an environment in its share/, and `pip install --target` likewise.
    package = Path(__file__).resolve().parent
    places = [package.parent, Path(sysconfig.get_path("data"), "share/meshrl"), package.parent / "share/meshrl"]
    return next((str(place / name) for place in places if (place / name).is_file()), name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # it contains words of the command line

    def options(self) -> list[str]:
        """The names of all options."""
        return [name for name in self._option_string_actions if name.startswith("--")]


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from meshrl.api import __version__

        print_output(f"meshrl {__version__}")
        parser.exit()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="meshrl", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of meshrl")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command, (function, text, options) in COMMANDS.items():
        sub = commands.add_parser(command, help=text, description=text)
        sub.set_defaults(command=function, overrides=None)
        one_of = sub.add_mutually_exclusive_group() if any(option.is_alone for option in options) else sub
        for option in options:
            (one_of if option.is_alone else sub).add_argument(option.name, **option.settings)

    name = next((text for text in argv if not text.startswith("-")), None)  # no option before it takes a value
    if name is not None and name not in commands.choices:
        known = ", ".join(commands.choices)
        parser.error(f"{name!r} is not a command; the commands are {known}{did_you_mean(name, commands.choices)}")
    args, rest = parser.parse_known_args(argv)
    if name is None and not rest:
        print_message(parser.format_help().rstrip("\n"))
        sys.exit(2)
    # argparse does not accept positionals that follow an option, as in `train CONFIG --explain key=value`.
    is_chat = name == "chat"  # its words are a question and settings
    wrong = [
        text
        for text in rest
        if text.startswith("-") or not ("=" in text or is_chat) or name is None or args.overrides is None
    ]
    if wrong:
        known_options = (commands.choices[name] if name else parser).options()
        dashes = any("=" in text for text in wrong) and " (overrides are written without dashes: key=value)"
        meant = "".join(did_you_mean(text, known_options) for text in wrong if text.startswith("--"))
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{dashes or meant}")
    if rest:
        args.overrides += rest
    return args


def _train(is_sft: bool, args: argparse.Namespace) -> None:
    from meshrl.api import sft, train
    from meshrl.run.inputs import load_run, load_sft

    if not args.explain:
        (sft if is_sft else train)(args.config, args.overrides)
    else:
        from meshrl.tools.explain import explain_config

        explain_config((load_sft if is_sft else load_run)(args.config, args.overrides, starts=False))


def _quickstart(args: argparse.Namespace) -> None:
    import runpy

    script = Path(name := _installed("examples/quickstart/quickstart.py"))
    if not script.is_absolute():
        raise MeshrlError(f"this installation has no {name}; install meshrl again, from its wheel")
    out = [] if args.out is None else ["--out", str(args.out)]
    sys.argv = [str(script), "--seed", str(args.seed), *out, *["--smoke"] * args.smoke]
    runpy.run_path(str(script), run_name="__main__")


def _evaluate(args: argparse.Namespace) -> None:
    from meshrl.api import evaluate

    evaluate(args.config, args.overrides, model=args.model, out=args.out)


def _init(args: argparse.Namespace) -> None:
    from meshrl.tools.init import DataFile, init

    rows = DataFile(args.data, args.prompt, args.answer, args.subset, args.split)
    print_message(init(args.folder, args.model, rows), sys.stdout)


def _translate(args: argparse.Namespace) -> None:
    from meshrl.tools.translate.command import translate_file

    print_output(translate_file(args.file, args.out, args.rows, args.devices), end="")


def _chat(args: argparse.Namespace) -> None:
    from meshrl.tools.chat import chat

    if not args.url and not args.model:
        raise ConfigError("give a model, such as runs/NAME, or --url of a server")
    models = [] if args.url else [*args.compare, args.model]
    words = [args.model, *args.overrides] if args.url and args.model else args.overrides
    chat(models, words, args.system, args.image, args.url)


def _serve(args: argparse.Namespace) -> None:
    from meshrl.tools.serve import serve

    serve(args.model, args.overrides, args.host, args.port)


def _launch(args: argparse.Namespace) -> None:
    from meshrl.cluster.slurm import batch_file
    from meshrl.core.files import output_errors
    from meshrl.run.inputs import load_run, load_sft

    is_sft = args.run == "sft"
    load = partial(load_sft, args.config) if is_sft else partial(load_run, args.config, purpose=args.run)
    load = partial(load, starts=None)
    options = {"time": args.time, "partition": args.partition, "account": args.account}
    size = args.nodes, args.gpus_per_node
    text = batch_file(load, args.run, args.config, args.overrides, *size, options, args.measured)
    if args.out is None:
        print_output(text, end="")
    else:
        remedy = "Give another file by --out"
        with output_errors(args.out, remedy, ConfigError), args.out.open("x", encoding="utf-8") as file:
            file.write(text)  # a new file: its user may have edited an existing one
        print_message(f"wrote {args.out}; submit it with: sbatch {args.out}", sys.stdout)


def _plan(args: argparse.Namespace) -> None:
    from meshrl.tools.memory_plan import plan_command

    if args.schedule and (args.json or args.search):
        raise ConfigError("--search and --json are of the memory alone; --schedule compares speeds. Leave one out")
    if args.search and args.gpu_memory is None:
        raise ConfigError("--search needs the memory of each GPU, into which a run has to fit: --gpu-memory SIZE")
    if args.schedule != (args.measured is not None):
        raise ConfigError("--schedule needs the times and lengths of a run, and they are for it only: --from RUN")
    memory = args.gpus, args.gpu_memory, args.json, args.search
    text = plan_command(args.config, args.overrides, *memory, args.measured)
    print_output(text, end="")


def _diagnose(args: argparse.Namespace) -> None:
    from meshrl.tools.diagnose.command import run

    print_output(printable(run(args.target, args.overrides, args.steps, args.out)))


def _doctor(args: argparse.Namespace) -> int:
    from meshrl.tools.doctor.command import doctor

    text, code = doctor(args.config, args.overrides, args.json, args.self_test, args.nodes)
    print_output(text, is_printable=True)
    return code


def _report(args: argparse.Namespace) -> None:
    from meshrl.tools.report.page import write_report

    print_message(f"wrote {write_report(args.folder, args.out)}", sys.stdout)


def _status(args: argparse.Namespace) -> None:
    from meshrl.tools.runs import describe

    print_output(describe(args.folder))


def _view(args: argparse.Namespace) -> None:
    prints = args.step is not None or args.evaluation is not None
    if (args.wrong or args.text) and not prints:
        raise ConfigError("--wrong and --text are about answers that are printed; add --step N or --eval")
    if args.out is not None and prints:
        raise ConfigError("--out is the page to write, and --step and --eval write none; leave it out")
    if prints:
        from meshrl.tools.viewer.answers import one_line_each, pages_of, read_answers

        kind, step = ("step", args.step) if args.evaluation is None else ("eval", args.evaluation)
        answers = read_answers(args.folder, kind, step, args.wrong)
        for text in one_line_each(answers) if args.text else pages_of(answers):
            print_output(text, is_printable=True)
        if args.text and answers.error:  # lines of stdout are counted
            print_message(answers.error)
    elif args.attention is not None:
        from meshrl.tools.viewer.attention import write_attention

        print_message("\n".join(write_attention(args.folder, args.attention, args.out)), sys.stdout)
    else:
        from meshrl.tools.viewer.page import write_view

        print_message("\n".join(write_view(args.folder, args.out, args.steps)), sys.stdout)


def _compare(args: argparse.Namespace) -> None:
    from meshrl.tools.compare.page import compare

    text, path = compare(args.folders, args.out)
    print_output(text)
    print_message(f"wrote {path}", sys.stdout)


def _runs(args: argparse.Namespace) -> None:
    from meshrl.tools.runs import list_runs

    print_output(list_runs(args.folder))


def _stop(args: argparse.Namespace) -> None:
    from meshrl.tools.runs import stop

    print_message(stop(args.folder), sys.stdout)


def _export(args: argparse.Namespace) -> None:
    from meshrl.tools.export import Export

    if args.type is not None and args.to != "gguf":
        raise ConfigError(f"--type is of --to gguf; --to {args.to} has the run's dtype. Leave it out")
    print_message(Export(args.run, args.to, args.type or "q8_0", args.out).write(args.push), sys.stdout)


def _replay(args: argparse.Namespace) -> int:
    from meshrl.tools.replay import replay

    stops = getattr(args, "break")
    try:
        difference = replay(args.folder, args.step, print_message, args.inline or stops, stops)
    except MeshrlError as error:
        raise ConfigError(str(error)) from error
    return 0 if difference is None else 1


def _convert(args: argparse.Namespace) -> None:
    from meshrl.core.files import is_there
    from meshrl.tools.convert import convert, convert_step

    if args.dtype is None and args.step is None and is_there(args.checkpoint / "checkpoints"):
        return _export(argparse.Namespace(run=args.checkpoint, to="hf", type=None, out=args.out, push=None))
    if args.step is not None:
        text, share = convert_step(args.checkpoint, args.step, args.out, args.dtype)
    else:
        text, share = convert(args.checkpoint, args.out, args.dtype)
    print_message(f"wrote {args.out}, of {text}", sys.stdout)
    if share is not None and share < 1:
        from_state = "--dtype float32 writes all of it from a training state"
        print_message(f"it has {share:.0%} of the LoRA adapters' change; {from_state}", sys.stdout)


def _model_check(args: argparse.Namespace) -> int:
    from meshrl.tools.model_check.command import check_model

    return 0 if check_model(args.model, print_output) else 1


def _config(args: argparse.Namespace) -> None:
    from meshrl.config.docs import list_keys

    print_output(list_keys(args.word))


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int | None], str, list[Argument]]] = {
    "train": (partial(_train, False), "train a model with reinforcement learning", TRAIN),
    "sft": (partial(_train, True), "train a model with supervised fine-tuning (SFT) on chat data", TRAIN),
    "eval": (_evaluate, "evaluate a model on its held-out rows, with loop.eval_samples answers per prompt", EVAL),
    "launch": (_launch, "write a Slurm batch file for a run on several nodes", LAUNCH),
    "plan": (
        _plan,
        "show what a run needs in its GPUs' memory, or (--schedule) the speed of each schedule",
        MEMORY_PLAN,
    ),
    "quickstart": (
        _quickstart,
        "train a tiny model in about a minute, from random weights, on two CPU cores",
        QUICKSTART,
    ),
    "init": (_init, "write a folder with configs and a reward function for your own rows and a model", INIT),
    "translate": (_translate, "write a config from one of verl, TRL or prime-rl", TRANSLATE),
    "chat": (_chat, "talk to a model in the terminal: one question, or a conversation", CHAT),
    "serve": (_serve, "serve a model to clients of OpenAI's and Anthropic's APIs, until Ctrl-C", SERVE),
    "diagnose": (_diagnose, "report where the time of a run goes, and what to change; see docs/see.md", DIAGNOSE),
    "doctor": (
        _doctor,
        "check this machine, alone or for the run of a config: OK, WARN or FAIL, and what to do",
        DOCTOR,
    ),
    "report": (_report, "write RUN/report.html from the run's files, during the run or after it", [RUN, PAGE]),
    "status": (_status, "print the state of a run: step, phase, reward, processes", [RUN]),
    "stop": (_stop, "end a run of this machine with a checkpoint, by SIGTERM; waits up to a minute", [RUN]),
    "view": (_view, "show the answers of a run: as a page (RUN/view.html) or in the terminal", VIEW),
    "compare": (_compare, "show what differs between runs or evaluations, also as a page", [RUNS, PAGE]),
    "runs": (
        _runs,
        "list the runs in a folder: state, progress, held-out scores",
        [arg("folder", "FOLDER", "default: runs", type=Path, nargs="?", default=Path("runs"))],
    ),
    "replay": (_replay, "repeat the training of a run's steps, and compare their digests: equal to the bit?", REPLAY),
    "convert": (_convert, "write the model folder of a checkpoint, GGUF file or vision model", CONVERT),
    "export": (_export, "write the model of a run for others: compared with the run, with a model card", EXPORT),
    "model-check": (
        _model_check,
        "check that meshrl trains and samples a model as Transformers computes it",
        [arg("model", "MODEL", "a model's folder, or a hub id, of which only config.json is fetched")],
    ),
    "config": (
        _config,
        "list the config keys with type, default and meaning",
        [arg("word", "WORD", "list only keys with this word in name or meaning", nargs="?")],
    ),
}

if __name__ == "__main__":
    sys.exit(main())
