"""What the results of a run depend on besides its config and data: versions, code, and the modules of its user; and
what of it differs now."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshrl.config.run import RunConfig
from meshrl.data.chat import ChatFiles
from meshrl.model.facts import local_folder
from meshrl.run.folder import Start

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "transformers", "numpy")
_MODULE_BYTES = 64 << 10  # a larger one is not copied
_PIECE_BYTES, _NUM_PIECES = 4096, 256  # of each file of a model


def start_record(config: RunConfig, chat: ChatFiles, start: Start | None, run: Path) -> dict[str, Any]:
    """The line of a start in digests.jsonl. config: as planned. start: the state that it continues from."""
    other = None if start is None or start.is_of(run) else start.folder
    return {
        "config": config.model_dump(mode="json"),
        "from": None if other is None else str(other),
        "chat_template": chat.template,
        "stop_token_ids": chat.stop_token_ids,
        "versions": _versions(),
        "code": _code(),
        "commit": _commit(),
        "modules": _modules(config),
        "model": model_digest(config.model.path),
    }


def changes_since(record: Mapping[str, Any]) -> list[str]:
    """In words, what of a start's record is different here."""
    was, now = dict(record.get("versions", {})), _versions()
    changes = [f"{name} was {was.get(name)}, is {value}" for name, value in now.items() if was.get(name) != value]
    if record.get("code") != _code():
        commit = f" (commit {record['commit'][:12]})" if record.get("commit") else ""
        changes.append(f"the code of meshrl is not that of the run{commit}")
    return changes


def recorded_modules(record: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The modules of a start's user: (another name, which no module of the working folder has, the source) by name."""
    modules = dict(record.get("modules", {}))
    return {name: (f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}", text) for name, text in modules.items()}


def with_recorded_modules(record: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a start, with the names of its `recorded_modules`."""
    config = deepcopy(record["config"])
    for module, (name, _) in recorded_modules(record).items():
        for section, key in ((config["algo"], "advantage"), (config["algo"]["loss"], "kind")):
            if section[key].startswith(f"{module}:"):
                section[key] = name + section[key].removeprefix(module)
    return config


def model_digest(path: str | Path) -> str:
    """Of the config and the weights of a model, a folder or a hub id: of each file the size, and pieces at equal
    distances. Training changes almost every value."""
    running, folder = hashlib.blake2b(digest_size=8), local_folder(path, ["config.json"])
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors*"))):
        size = path.stat().st_size
        running.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(_PIECE_BYTES, size // _NUM_PIECES)):
                file.seek(at)
                running.update(file.read(_PIECE_BYTES))
    return running.hexdigest()


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("meshrl", *_LIBRARIES)}


@cache
def _code() -> str:
    """A digest of all source files of meshrl."""
    running = hashlib.blake2b(digest_size=8)
    for path in sorted(_PACKAGE.rglob("*.py")):
        running.update(path.relative_to(_PACKAGE).as_posix().encode())
        running.update(path.read_bytes())
    return running.hexdigest()


@cache
def _commit() -> str | None:
    """The commit of meshrl's repository, if it runs from one."""
    folder = _PACKAGE.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _modules(config: RunConfig) -> dict[str, str]:
    """The sources of the modules of the user's advantage and loss, those without a package."""
    paths = [path for path in (*config.algo.advantages.values(), config.algo.loss.kind) if ":" in path]
    found = {}
    for name in {path.partition(":")[0] for path in paths}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if "." not in name and file and Path(file).stat().st_size <= _MODULE_BYTES:
            found[name] = Path(file).read_text(encoding="utf-8")
    return found
