"""The arguments of the commands of cli.py. Only the standard library is imported here."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from meshrl.core.errors import ConfigError
from meshrl.core.terminal import printable


class Argument(NamedTuple):
    """An argument of a command. settings: as of argparse. is_alone: only one such argument is allowed."""

    name: str
    settings: dict[str, Any]
    is_alone: bool = False


def arg(name: str, metavar: str | None, text: str, is_alone: bool = False, **more: Any) -> Argument:
    shown = {} if metavar is None else {"metavar": metavar}
    return Argument(name, {**shown, "help": text, **more}, is_alone)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is not an integer of at least 1")
    return int(text)


def memory_size(text: str) -> int:
    """Bytes, of a text such as 80GB or 24 GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])(i?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is not a size with its unit, such as 80GB or 80GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1))


def new_folder(text: str) -> Path:
    """A path where nothing is yet: this is checked before the imports of a command, which take seconds."""
    if os.path.lexists(text):
        raise ConfigError(f"{text} already exists; give the name of a new folder")
    return Path(text)


CONFIG = "YAML file; `meshrl config` lists its keys"
OVERRIDES = arg("overrides", "key=value", "values that override the file, such as train.optimizer.lr=1e-6", nargs="*")
EXPLAIN = arg(
    "--explain",
    None,
    "start nothing; print the sizes of a step, each value with its origin, and the memory of a rank",
    action="store_true",
)
RUN = arg("folder", "RUN", "folder of the run, such as runs/NAME", type=Path)
RUNS = arg("folders", "RUN", "folders of two or more runs", type=Path, nargs="+")
PAGE = arg("--out", "FILE", "page to write (default: in RUN, or the first RUN)", type=Path)
RUN_CONFIG = [arg("config", "CONFIG", CONFIG), OVERRIDES]
TRAIN = [*RUN_CONFIG, EXPLAIN]
QUICKSTART = [
    arg("--seed", "N", "for weights, data order and sampling (default 0)", type=int, default=0),
    arg("--out", "FOLDER", "folder of the seeds' folders (default: runs/quickstart)", type=Path),
    arg("--smoke", None, "a few steps only, which learn nothing", action="store_true"),
]
EVAL = [
    arg("config", "CONFIG", f"{CONFIG}, or runs/NAME to evaluate a run with its own config"),
    OVERRIDES,
    arg(
        "--model",
        "FOLDER",
        "evaluate this model instead of model.path: a model's folder, a run's folder such as runs/NAME (its "
        "best model), or a step's folder such as runs/NAME/checkpoints/step_000100",
    ),
    arg("--out", "FOLDER", "new folder for the answers and results (default: eval_N in the run)", type=new_folder),
]
LAUNCH = [
    arg("scheduler", None, "the scheduler of the cluster", choices=["slurm"]),
    *RUN_CONFIG,
    arg(
        "--command",
        None,
        "command that the batch file runs (default train)",
        dest="run",
        choices=["train", "sft", "eval"],
        default="train",
    ),
    arg("--nodes", "N", "number of nodes (default 1)", type=int, default=1),
    arg("--gpus-per-node", "G", "GPUs of each node; the run uses N x G ranks (default: the config's)", type=int),
    arg(
        "--from",
        "RUN",
        "folder of a run, from which the time to end with a checkpoint is taken (default: 300 s)",
        dest="measured",
        type=Path,
    ),
    arg("--time", "TIME", "time limit, such as 12:00:00 (default: the cluster's)"),
    arg("--partition", "PARTITION", "partition (default: the cluster's)"),
    arg("--account", "ACCOUNT", "account to charge (default: the cluster's)"),
    arg("--out", "FILE", "file to write (default: print to the terminal)", type=Path),
]
MEMORY_PLAN = [
    *RUN_CONFIG,
    arg(
        "--gpu-memory",
        "SIZE",
        "memory of each GPU, such as 80GB: prints whether the run fits, and what makes it fit",
        type=memory_size,
    ),
    arg("--search", None, "with it: the five fastest meshes and modes that fit", action="store_true"),
    arg("--json", None, "print the memory as JSON", action="store_true"),
    arg(
        "--schedule",
        None,
        "compare the speed of schedules; with --gpu-memory, recommend what fits",
        action="store_true",
    ),
    arg(
        "--from",
        "RUN",
        "folder of a run with loop.kind=colocated, from which times and lengths are taken",
        dest="measured",
        type=Path,
    ),
    arg("--gpus", "N", "number of GPUs (default: the ranks of the config)", type=int),
]
INIT = [
    arg("folder", "FOLDER", "folder to write; it must not exist yet", type=new_folder),
    arg("--model", "MODEL", "the model to train: its folder, a hub id, or runs/NAME", required=True),
    arg("--data", "FILE", "your rows: CSV, TSV, JSON, JSONL, parquet, or a hub id", required=True),
    arg("--prompt", "COLUMN", "column with the questions (default: question)", default="question"),
    arg("--answer", "COLUMN", "column with the right answers (default: answer)", default="answer"),
    arg("--subset", "NAME", "configuration of a hub data set that has several"),
    arg("--split", "NAME", "split of a Hugging Face data set that has several"),
]
TRANSLATE = [
    arg(
        "file",
        "FILE",
        "config or script of a recipe of verl, TRL (a GRPOConfig in Python, or YAML) or prime-rl",
        type=Path,
    ),
    arg("--out", "FILE", "new file to write (default: print to the terminal)", type=Path),
    arg("--rows", "N", "rows of the training data, by which epochs become steps", type=positive),
    arg(
        "--devices",
        "N",
        "devices that train with TRL, which counts answers on each (default 1)",
        type=positive,
        default=1,
    ),
]
_SETTINGS = (
    "settings: temperature=0.7 max_new_tokens=512 top_p=1 top_k=0 min_p=0 repetition_penalty=1 seed=0 dtype=bfloat16"
)
_MODEL = "a model's folder, a hub id, or runs/NAME for its best model"
CHAT = [
    arg("model", "MODEL", _MODEL, nargs="?"),
    arg(
        "overrides",
        "QUESTION|key=value",
        f"one question in quotes (default: ask for questions), and {_SETTINGS}",
        nargs="*",
        default=[],  # otherwise argparse calls it required
    ),
    arg("--compare", "MODEL", "another model that answers, too", action="append", default=[]),
    arg("--image", "FILE", "image of the first question; may be given several times", action="append", default=[]),
    arg("--system", "TEXT", "text of a system message (default: the chat template's)"),
    arg("--url", "URL", "of a server, in place of a model; its key is in MESHRL_SERVE_KEY"),
]
SERVE = [
    arg("model", "MODEL", _MODEL),
    arg("overrides", "key=value", f"{_SETTINGS}; clients may set others", nargs="*", default=[]),
    arg("--host", "HOST", "address to listen on (default 127.0.0.1: this machine only)", default="127.0.0.1"),
    arg("--port", "PORT", "port to listen on (default 8000; 0 = a free one)", type=int, default=8000),
]
DIAGNOSE = [
    arg(
        "target",
        "CONFIG|RUN",
        "a config, some steps of which are run with torch.profiler; or the folder of a run that has traces",
        type=Path,
    ),
    arg("overrides", "key=value", "values that override those of a config", nargs="*"),
    arg("--trace", None, "the kind of diagnosis; so far only fsdp", choices=["fsdp"], default="fsdp"),
    arg("--steps", "N", "steps of a config to profile (default 4)", type=positive, default=4),
    arg("--out", "FOLDER", "folder for the files (default: the run's)", type=Path),
]
DOCTOR = [
    arg("config", "CONFIG", f"{CONFIG} (default: check the machine alone)", nargs="?"),
    OVERRIDES,
    arg("--self-test", None, "also make a step of a tiny model with two ranks, in about a minute", action="store_true"),
    arg("--nodes", None, "compare the machines of a cluster; started by torchrun or srun on each", action="store_true"),
    arg("--json", None, "print the lines and what was measured as JSON", action="store_true"),
]
VIEW = [
    RUN,
    arg("--steps", "A-B", "write view_A-B.html with these steps only, such as 10-20", True),
    arg("--step", "N", "print the answers of this step; -1 is the last one", True, type=int),
    arg(
        "--eval",
        "N",
        "print the answers of the evaluation after N steps (default: of the last one)",
        True,
        type=int,
        nargs="?",
        const=-1,
        dest="evaluation",
    ),
    arg(
        "--attention",
        "STEP/GROUP/ANSWER",
        "write a page about what each token of an answer attends to, from saved weights; the other views show "
        "the names of answers, such as 12/3/0, or eval_12/3/0 of the evaluation after step 12",
        True,
    ),
    arg("--wrong", None, "print only answers with a score below loop.eval_pass_score", action="store_true"),
    arg("--text", None, "print only the text of each answer, as one line", action="store_true"),
    PAGE,
]
REPLAY = [
    RUN,
    arg("--step", "N", "the last step to repeat", type=positive, required=True),
    arg("--inline", None, "in one process; compare gradients and metrics within rounding", action="store_true"),
    arg("--break", None, "--inline, with a breakpoint before each optimizer step of step N", action="store_true"),
]
CONVERT = [
    arg(
        "checkpoint",
        "CHECKPOINT",
        "such as runs/NAME/checkpoints/step_000100, runs/NAME for its best, model.gguf, or a model's folder",
        type=Path,
    ),
    arg("out", "FOLDER", "the model folder to write; it must not exist yet", type=new_folder),
    arg("--step", "N", "of runs/NAME: the model after this step, by a replay if nothing is saved", type=positive),
    arg(
        "--dtype",
        None,
        "of the weights (default: model.dtype of the run); float32 keeps all changes of LoRA and fp32 masters",
        choices=("bfloat16", "float32", "float16"),
    ),
]
EXPORT = [
    arg("run", "RUN", "runs/NAME for its best model, or a step such as runs/NAME/checkpoints/step_000100", type=Path),
    arg("out", "FOLDER", "the folder to write (default: in RUN/exports)", type=new_folder, nargs="?"),
    arg(
        "--to",
        None,
        "a model folder with merged weights, the LoRA adapter alone, or a GGUF file (Llama, Mistral, Qwen2, Qwen3)",
        choices=("hf", "adapter", "gguf"),
        required=True,
    ),
    arg("--type", None, "of the matrices in a GGUF file (default: q8_0)", choices=("f16", "q8_0", "bf16", "f32")),
    arg("--push", "NAME", "also upload the folder to this repository of the Hugging Face hub, such as me/model"),
]
