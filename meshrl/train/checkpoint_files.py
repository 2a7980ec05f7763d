"""The files of a checkpoint: written aside, hashed, listed, renamed last; and what is proven before one is read.

    RUN/checkpoints/step_000012/state/
        rank_00000.safetensors ...   tensors, each rank its shards (train/checkpoint.py)
        controller.json              the state of run and loop (run/live.py)
        manifest.json                size and hash of every other file, and a hash of itself

A folder of this name is whole: it is filled under another name, each file is flushed to disk and read back, the
manifest is written when all others are there, and the rename comes last. A writer that was killed leaves a folder
`state.aside`, which nothing reads and the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrl.core.errors import CheckpointError
from meshrl.core.files import Unreadable, open_plain, read_json

CHECKPOINT_SCHEMA = 2
MANIFEST, CONTROLLER = "manifest.json", "controller.json"
_CHUNK_BYTES = 16 << 20
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file as it was written. blake2b: hexadecimal, of 16 bytes; at memory speed, and no accident meets it."""

    num_bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What manifest.json says. num_ranks: how many wrote the tensors; any number may read them."""

    step: int
    num_ranks: int
    files: dict[str, FileFact]


def state_folder(checkpoints: Path, step: int) -> Path:
    """Where the state after `step` finished steps lies."""
    return checkpoints / f"step_{step:06d}" / "state"


def states(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints of a run, the newest last. Only complete ones bear the name."""
    found = []
    for folder in checkpoints.glob("step_*"):
        named = _STEP_FOLDER.fullmatch(folder.name)
        if named and (folder / "state" / MANIFEST).is_file():
            found.append((int(named[1]), folder / "state"))
    return sorted(found)


# ---- writing


def require_space(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
    """Raises: CheckpointError when the disk of `folder` has less room than `what` takes."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{what} below {folder} takes {num_bytes:,} bytes, but its disk has {free:,} free; nothing was "
            "written, and what is there stays. Make room, lower run.keep_checkpoints, or save less often"
        )


def begin_aside(final: Path) -> Path:
    """An empty folder to fill; what a killed writer left there is removed."""
    aside = _aside(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def write_file(path: Path, parts: Iterable[memoryview]) -> FileFact:
    """Write, flush to disk, read back. The hash is of what was to be written, so that a disk that lies is seen.

    Raises: CheckpointError naming the file.
    """
    digest, size = _new_digest(), 0
    try:
        with path.open("wb") as file:
            for part in parts:
                for start in range(0, part.nbytes, _CHUNK_BYTES):
                    chunk = part[start : start + _CHUNK_BYTES]
                    digest.update(chunk)
                    file.write(chunk)
                size += part.nbytes
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # read back from the disk, not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as cause:
        raise CheckpointError(f"{path} can't be written: {cause}") from cause
    fact = FileFact(size, digest.hexdigest())
    require_as_written(path, fact)
    return fact


def write_json(path: Path, content: Mapping[str, Any]) -> FileFact:
    """Plain JSON; NaN and infinities as Python spells them."""
    return write_file(path, [memoryview(json.dumps(content, indent=1).encode() + b"\n")])


def commit(final: Path, manifest: Manifest) -> None:
    """List the files that lie aside, and give the folder its name. From here on it is a checkpoint."""
    aside = _aside(final)
    content = {"schema": CHECKPOINT_SCHEMA, **asdict(manifest)}
    write_json(aside / MANIFEST, {**content, "blake2b": _digest_of(content)})
    _flush_folder(aside)
    os.rename(aside, final)
    _flush_folder(final.parent)
    _flush_folder(final.parent.parent)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove the oldest states beyond the newest `keep`. Only those count as kept whose manifest is right and whose
    files have their sizes, so a damaged newer one never costs the last good one. Models beside them stay."""
    removed, good = [], 0
    for _, folder in reversed(states(checkpoints)):
        if good >= keep:
            # The manifest goes first: a removal that is interrupted leaves nothing that looks like a checkpoint.
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder)
            removed.append(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        good += not list(_faults_at_a_glance(folder))
    return removed


def remove_leftovers(checkpoints: Path) -> None:
    """What a killed run was writing or removing."""
    for folder in checkpoints.glob("step_*"):
        state = folder / "state"
        shutil.rmtree(_aside(state), ignore_errors=True)
        if state.is_dir() and not (state / MANIFEST).is_file():
            shutil.rmtree(state, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _aside(final: Path) -> Path:
    return final.with_name(final.name + ".aside")


def _flush_folder(folder: Path) -> None:
    """The names in it to disk: a rename is durable only with its folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest, proven by its own hash.

    Raises: CheckpointError when there is none, when it is damaged, or when it is of another schema.
    """
    path = folder / MANIFEST
    try:
        content = read_json(path)
        told = content.pop("blake2b")
        if told != _digest_of(content):
            raise ValueError("its content does not have the hash that it names")
        if content["schema"] != CHECKPOINT_SCHEMA:
            raise ValueError(f"schema {content['schema']!r}; this version reads schema {CHECKPOINT_SCHEMA}")
        files = {name: FileFact(int(f["num_bytes"]), str(f["blake2b"])) for name, f in content["files"].items()}
        if CONTROLLER not in files or any(Path(name).name != name for name in files):
            raise ValueError(f"it lists the files {sorted(files)}")
        return Manifest(step=int(content["step"]), num_ranks=int(content["num_ranks"]), files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(
            f"{path} is no manifest of a checkpoint: {type(cause).__name__}: {cause}. {_WHAT_TO_DO}"
        ) from cause


def read_controller(folder: Path) -> dict[str, Any]:
    """What the loop saved, proven by the manifest's hash. Raises: CheckpointError."""
    require_as_written(folder / CONTROLLER, read_manifest(folder).files[CONTROLLER])
    try:
        return read_json(folder / CONTROLLER)
    except Unreadable as cause:
        raise CheckpointError(f"{folder / CONTROLLER}: {cause}. {_WHAT_TO_DO}") from cause


def faults(folder: Path, manifest: Manifest, share: int = 0, num_shares: int = 1) -> list[str]:
    """What is wrong with the files, as texts that name each. Ranks divide the hashing: each takes every num_shares-th
    file, and all look at names and sizes."""
    found = list(_faults_at_a_glance(folder, manifest))
    if not found:
        for name in sorted(manifest.files)[share::num_shares]:
            try:
                require_as_written(folder / name, manifest.files[name])
            except CheckpointError as fault:
                found.append(str(fault))
    return found


def require_as_written(path: Path, fact: FileFact) -> None:
    """Raises: CheckpointError when the file is gone, cut, or holds another content than was written."""
    digest, size = _new_digest(), 0
    try:
        with open_plain(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except (OSError, Unreadable) as cause:
        raise CheckpointError(f"{path} can't be read: {cause}. {_WHAT_TO_DO}") from cause
    if size != fact.num_bytes:
        raise CheckpointError(f"{path} has {size:,} bytes, but was written with {fact.num_bytes:,}. {_WHAT_TO_DO}")
    if digest.hexdigest() != fact.blake2b:
        raise CheckpointError(f"{path} is damaged: its content is not what was written. {_WHAT_TO_DO}")


def _faults_at_a_glance(folder: Path, manifest: Manifest | None = None) -> Iterator[str]:
    """By names and sizes alone: cheap enough for each save."""
    if manifest is None:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as fault:
            yield str(fault)
            return
    for name, fact in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing. {_WHAT_TO_DO}"
        elif path.stat().st_size != fact.num_bytes:
            size = path.stat().st_size
            yield f"{path} has {size:,} bytes, but was written with {fact.num_bytes:,}. {_WHAT_TO_DO}"
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            yield f"{path} is not a file of this checkpoint; remove it"


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _digest_of(content: dict[str, Any]) -> str:
    digest = _new_digest()
    digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()


_WHAT_TO_DO = "Continue from another checkpoint (run.resume=FOLDER), or remove this one"
