"""The config.yaml of a run as the config of an evaluation. Another user may have written the run, so no code of its
folder is run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshrl.config.case import Problem, Value
from meshrl.config.source import COMMAND_LINE
from meshrl.core.files import is_private
from meshrl.core.lookup import DOTTED_PATH, can_be_imported


def trusted_folder(value: Value | None, folder: Path, run: Path) -> Path:
    """The folder of modules: that of run.module_folder, if it is given on the command line, or lies outside the run and
    no other user can write there; else the working folder."""
    is_given = value is not None and value.origin == COMMAND_LINE
    return folder if is_given or _is_trusted(folder, run) else Path.cwd()


def code_of_the_run(written: Mapping[str, Value], run: Path) -> Iterator[Problem]:
    """Values of the config.yaml that name a module or a program in the run's folder, or a program of another user.
    Nothing is imported."""
    here = Path.cwd()
    if here.resolve().is_relative_to(run.resolve()):
        yield Problem(("run.folder",), "modules of the working folder are imported. Use another one than this run's.")
    for key, value in written.items():
        texts = value.value if isinstance(value.value, list) else [value.value]
        for text in (each for each in texts if isinstance(each, str) and value.origin != COMMAND_LINE):
            if key in ("rollout.vllm.python", "rollout.sglang.python"):
                if "/" in text and not _is_trusted(Path(text).expanduser(), run):
                    yield Problem((key,), f"another user may have written it. If you trust it, add {key}={text}.")
            elif DOTTED_PATH.fullmatch(text) and _is_of(run, text):
                reason = "no module of a run's folder is imported: another user may have written it. If you trust it,"
                yield Problem((key,), f"{reason} set PYTHONPATH={run.resolve()}, or copy it to the working folder.")


def _is_trusted(path: Path, run: Path) -> bool:
    return is_private(path) and not path.resolve().is_relative_to(run.resolve())


def _is_of(run: Path, text: str) -> bool:
    """Whether this dotted path would be found in the run's folder only, or through a folder above it, but not in the
    run's folder as an entry of Python's path."""
    parts = text.partition(":")[0].split(".")
    if not can_be_imported(text):
        return run.joinpath(parts[0]).is_dir() or run.joinpath(f"{parts[0]}.py").is_file()
    entries = [Path(entry).resolve() for entry in [str(Path.cwd()), *sys.path]]
    above = [entry for entry in entries if run.resolve().is_relative_to(entry) and entry != run.resolve()]
    return any(entry.joinpath(*parts).resolve().is_relative_to(run.resolve()) for entry in above)
