"""What the results of a run depend on besides its config and data: versions, code, and the modules of its user; and
what of it differs now."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshrl.config.run import RunConfig
from meshrl.data.chat import ChatFiles
from meshrl.run.folder import Start

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "transformers", "numpy")
_MODULE_BYTES = 64 << 10  # a larger one is not copied


def start_record(config: RunConfig, chat: ChatFiles, start: Start | None, run: Path) -> dict[str, Any]:
    """The line of a start in digests.jsonl. config: as planned. start: the state that it continues from."""
    is_foreign = start is not None and start.folder is not None and not start.is_of(run)
    return {
        "config": config.model_dump(mode="json"),
        "from": str(start.folder) if is_foreign and start is not None else None,
        "chat_template": chat.template,
        "stop_token_ids": chat.stop_token_ids,
        "versions": _versions(),
        "code": _code(),
        "commit": _commit(),
        "modules": _modules(config),
    }


def changes_since(record: Mapping[str, Any]) -> list[str]:
    """In words, what of a start's record is different here."""
    was, now = dict(record.get("versions", {})), _versions()
    changes = [f"{name} was {was.get(name)}, is {value}" for name, value in now.items() if was.get(name) != value]
    if record.get("code") != _code():
        commit = f" (commit {record['commit'][:12]})" if record.get("commit") else ""
        changes.append(f"the code of meshrl is not that of the run{commit}")
    return changes


@contextmanager
def recorded_modules(record: Mapping[str, Any]) -> Iterator[None]:
    """In this block, the recorded modules of the user are imported in place of those of the working folder."""
    modules = record.get("modules", {})
    with tempfile.TemporaryDirectory() as name:
        for module, source in modules.items():
            Path(name, f"{module}.py").write_text(source, encoding="utf-8")
            sys.modules.pop(module, None)
        if modules:
            sys.path.insert(0, name)
        try:
            yield
        finally:
            if modules:
                sys.path.remove(name)


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
    paths = [path for path in (config.algo.advantage, config.algo.loss.kind) if ":" in path]
    found = {}
    for name in {path.partition(":")[0] for path in paths}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if "." not in name and file and Path(file).stat().st_size <= _MODULE_BYTES:
            found[name] = Path(file).read_text(encoding="utf-8")
    return found
