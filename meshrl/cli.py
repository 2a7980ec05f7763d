"""The command line. Only the standard library is imported here, so that `--help` and a config error answer at once.

Exit codes: 0 done, 1 the run failed, 2 the config or the command line is wrong, 130 interrupted.
MESHRL_TRACEBACK=1 shows the traceback of errors of which otherwise only the message is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshrl.core.errors import ConfigError, MeshrlError

if TYPE_CHECKING:
    from meshrl.config.load import Loaded
    from meshrl.config.run import RunConfig, SftRunConfig

DESCRIPTION = "Reinforcement-learning post-training of language models on PyTorch FSDP2."
EPILOG = "example: meshrl train gsm8k.yaml train.optimizer.lr=1e-6 --explain"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except MeshrlError as e:
        if os.environ.get("MESHRL_TRACEBACK") == "1":
            raise
        name = "" if isinstance(e, ConfigError) else f"{type(e).__name__}: "
        print("\n".join([f"meshrl: {name}{e}", *getattr(e, "__notes__", ())]), file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        print("meshrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) ended first
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshrl", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command, overrides=None)
        return sub

    train = add("train", _train, "reinforcement learning: sample, score, update, sync, again")
    sft = add("sft", _sft, "supervised fine-tuning on chat rows")
    evaluate = add("eval", _evaluate, "evaluate a model on data.eval_path (loop.eval_samples answers a prompt)")
    launch = add("launch", _launch, "write the batch file of a job on several nodes; `meshrl launch slurm CONFIG`")
    launch.add_argument("scheduler", choices=["slurm"], help="the scheduler that the file is for")
    for sub in (train, sft, evaluate, launch):
        sub.add_argument("config", metavar="CONFIG", help="YAML file; docs/config.md lists its keys")
        sub.add_argument(
            "overrides", metavar="key=value", nargs="*", help="dotted overrides such as train.optimizer.lr=1e-6"
        )
    for sub in (train, sft):
        sub.add_argument(
            "--explain",
            action="store_true",
            help="print what a step does, and the resolved config with its origins",
        )
    _add_launch_options(launch)
    evaluate.add_argument("--model", metavar="FOLDER", help="evaluate this model in place of model.path")
    report = add("report", _report, "write RUN/report.html again; works while the run goes on, too")
    report.add_argument("folder", metavar="RUN", help="a run's folder, such as runs/NAME")
    status = add("status", _status, "print the state of a run: step, phase, reward, processes")
    stop = add("stop", _stop, "end a run with a checkpoint, as Ctrl-C does, from another terminal")
    for sub in (status, stop):
        sub.add_argument("folder", metavar="RUN", help="a run's folder, such as runs/NAME")
    convert = add("convert", _convert, "write a checkpoint as a folder that from_pretrained loads")
    convert.add_argument("checkpoint", metavar="CHECKPOINT", help="such as runs/NAME/checkpoints/step_000100")
    convert.add_argument("out", metavar="FOLDER", help="the folder to write; must not exist yet")
    config = add("config", _config, "list the keys of the config with type, default and meaning")
    config.add_argument("word", metavar="WORD", nargs="?", help="only keys that contain this word")

    args, rest = parser.parse_known_args(argv)
    # argparse does not accept positionals that follow an option, as in `train CONFIG --explain key=value`.
    wrong = [text for text in rest if text.startswith("-") or "=" not in text or args.overrides is None]
    if wrong:
        dashes = any("=" in text for text in wrong) and " (overrides are written without dashes: key=value)"
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{dashes or ''}")
    if rest:
        args.overrides += rest
    return args


def _add_launch_options(launch: argparse.ArgumentParser) -> None:
    launch.add_argument("--command", dest="run", choices=["train", "sft", "eval"], default="train", help="what to run")
    launch.add_argument("--nodes", type=int, default=1, metavar="N", help="machines; 1 when not given")
    launch.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="sets the number of ranks to N x G; else the config's is kept"
    )
    for name, text in (("time", "limit, as 12:00:00"), ("partition", "queue"), ("account", "account to charge")):
        launch.add_argument(f"--{name}", metavar=name.upper(), help=f"{text}; the cluster's default when not given")
    launch.add_argument("--out", metavar="FILE", help="where to write it; the terminal when not given")


def _train(args: argparse.Namespace) -> int:
    from meshrl.run.inputs import load_run, show_notices

    loaded = load_run(args.config, args.overrides)
    if args.explain:
        return _explain(loaded)
    show_notices(loaded)
    from meshrl.run.start import train
    from meshrl.tools.report.page import write_report

    train(loaded, write_report)
    return 0


def _sft(args: argparse.Namespace) -> int:
    from meshrl.run.inputs import load_sft, show_notices

    loaded = load_sft(args.config, args.overrides)
    if args.explain:
        return _explain(loaded)
    show_notices(loaded)
    from meshrl.run.start import sft
    from meshrl.tools.report.page import write_report

    sft(loaded, write_report)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from meshrl.run.inputs import load_run, show_notices

    model = [f"model.path={json.dumps(args.model)}"] if args.model is not None else []
    loaded = load_run(args.config, [*args.overrides, *model], "eval")
    show_notices(loaded)
    from meshrl.run.start import evaluate

    evaluate(loaded)
    return 0


def _launch(args: argparse.Namespace) -> int:
    from functools import partial
    from pathlib import Path

    from meshrl.cluster.slurm import SlurmJob, batch_file
    from meshrl.run.inputs import load_run, load_sft

    is_sft = args.run == "sft"
    load = partial(load_sft, args.config) if is_sft else partial(load_run, args.config, purpose=args.run)
    job = SlurmJob(
        command=args.run,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        time=args.time,
        partition=args.partition,
        account=args.account,
    )
    text = batch_file(load, args.config, args.overrides, job)
    if args.out is None:
        print(text, end="")
    else:
        Path(args.out).write_text(text, encoding="utf-8")
        print(f"wrote {args.out}; submit it by: sbatch {args.out}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meshrl.tools.report.page import write_report

    print(f"wrote {write_report(Path(args.folder))}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meshrl.tools.status import describe

    print(describe(Path(args.folder)))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meshrl.tools.status import stop

    print(stop(Path(args.folder)))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meshrl.tools.convert import convert

    convert(Path(args.checkpoint), Path(args.out))
    print(f"wrote {args.out}")
    return 0


def _config(args: argparse.Namespace) -> int:
    from meshrl.config.docs import list_keys

    print(list_keys(args.word))
    return 0


def _explain(loaded: Loaded[RunConfig] | Loaded[SftRunConfig]) -> int:
    from meshrl.config.explain import explain
    from meshrl.data.check import count_rows

    print(explain(loaded, count_rows(loaded.config)), end="")
    return 0
