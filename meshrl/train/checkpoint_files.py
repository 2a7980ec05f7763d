"""The files of a checkpoint: written to a temporary folder, hashed, listed, renamed; and verified before they are read.

    RUN/checkpoints/step_000012/state/
        policy_rank_00000.safetensors ...   tensors of a trained role, each rank its shards (train/checkpoint.py)
        controller.json              the state of run and loop (run/keeper.py)
        manifest.json                size and hash of every other file, and its own hash

A folder named `state` is always complete: it is written as `state.aside`, each file is flushed to disk and read back,
the manifest is written after all other files, and the folder is renamed last. A killed writer leaves a folder
`state.aside`, which is never read and which the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.core.errors import CheckpointError
from meshrl.core.files import CONTINUE_LATER, Unreadable, open_plain, output_errors, read_json

CHECKPOINT_SCHEMA = 3
MANIFEST, CONTROLLER = "manifest.json", "controller.json"
_CHUNK_BYTES = 16 << 20
_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_new_digest = partial(hashlib.blake2b, digest_size=16)


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file as it was written. blake2b: hexadecimal, 16 bytes; as fast as memory, and safe from accidental
    collisions."""

    num_bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of manifest.json. num_ranks: the ranks that wrote the tensors; any number may read them."""

    step: int
    num_ranks: int
    files: dict[str, FileFact]


def state_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the state after `step` finished steps."""
    return checkpoints / f"step_{step:06d}" / "state"


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything that a run has saved for its steps, the newest last."""
    named = ((_STEP_FOLDER.fullmatch(folder.name), folder) for folder in checkpoints.glob("step_*"))
    return sorted((int(name[1]), folder) for name, folder in named if name and folder.is_dir())


def states(checkpoints: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints of a run, the newest last."""
    folders = ((step, folder / "state") for step, folder in step_folders(checkpoints))
    return [(step, state) for step, state in folders if (state / MANIFEST).is_file()]


# ---- writing


_RESERVE_BYTES = 64 << 20  # the tokenizers of the largest vocabularies have 40 MB


def require_space(folder: Path, num_bytes: int, what: str = "a checkpoint") -> None:
    """Raises: CheckpointError when the disk of `folder` has less room than the tensors of `what` and _RESERVE_BYTES."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _RESERVE_BYTES:
        raise CheckpointError(
            f"{what} below {folder} takes {num_bytes:,} bytes, but its disk has {free:,} free; nothing was written, "
            f"and existing files stay. {_RESERVE_BYTES:,} more are needed for tokenizer, JSON files and headers. Make "
            "room, lower run.keep_checkpoints or run.keep_models, or save less often"
        )


def make_temporary_folder(final: Path) -> Path:
    """The temporary folder of `final`, emptied: a killed writer may have left files in it."""
    temporary = _temporary(final)
    shutil.rmtree(temporary, ignore_errors=True)
    with _writing(temporary):
        temporary.mkdir(parents=True)
    return temporary


_writing = partial(output_errors, advice=CONTINUE_LATER, kind=CheckpointError)


def write_file(path: Path, parts: Iterable[memoryview]) -> FileFact:
    """Write, flush to disk, read back. The hash is of the data in memory, so that a faulty disk is noticed."""
    digest, size = _new_digest(), 0
    with _writing(path), path.open("wb") as file:
        for part in parts:
            for start in range(0, part.nbytes, _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            size += part.nbytes
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that the read-back comes from the disk, not from the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    fact = FileFact(size, digest.hexdigest())
    require_as_written(path, fact)
    return fact


def write_json(path: Path, content: Mapping[str, Any]) -> FileFact:
    """Plain JSON; NaN and infinities as Python writes them."""
    return write_file(path, [memoryview(json.dumps(content, indent=1).encode() + b"\n")])


def commit(final: Path, manifest: Manifest) -> None:
    """Write the manifest and rename the temporary folder to `final`. From now on it is a checkpoint."""
    temporary = _temporary(final)
    content = {"schema": CHECKPOINT_SCHEMA, **asdict(manifest)}
    write_json(temporary / MANIFEST, {**content, "blake2b": _digest_of(content)})
    with _writing(final):
        _flush_folder(temporary)
        os.rename(temporary, final)
        _flush_folder(final.parent)
        _flush_folder(final.parent.parent)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` states. A state counts only if its manifest is valid and its files have the
    right sizes, so a damaged newer state never causes the removal of the last good one. Exported models stay."""
    removed, good = [], 0
    for _, folder in reversed(states(checkpoints)):
        if good >= keep:
            # Renamed first: a removal that is interrupted leaves nothing that looks like a checkpoint.
            temporary = _temporary(folder)
            shutil.rmtree(temporary, ignore_errors=True)
            os.rename(folder, temporary)
            shutil.rmtree(temporary)
            removed.append(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        good += not list(_quick_faults(folder))
    return removed


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for _, folder in step_folders(checkpoints):
        for leftover in (_temporary(folder / "state"), folder / "model.aside"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + ".aside")


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: a rename is durable only after that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest, verified by its own hash."""
    path = folder / MANIFEST
    try:
        content = read_json(path)
        expected = content.pop("blake2b")
        if expected != _digest_of(content):
            raise ValueError("its content does not have the hash that it states")
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
    """The saved state of the loop, verified by the manifest's hash."""
    require_as_written(folder / CONTROLLER, read_manifest(folder).files[CONTROLLER])
    try:
        return read_json(folder / CONTROLLER)
    except Unreadable as cause:
        raise CheckpointError(f"{folder / CONTROLLER}: {cause}. {_WHAT_TO_DO}") from cause


def faults(folder: Path, manifest: Manifest, share: int = 0, num_shares: int = 1) -> list[str]:
    """The faults of the files, each as a text that names the file. Ranks share the hashing: each hashes every
    num_shares-th file, and all check names and sizes."""
    problems = list(_quick_faults(folder, manifest))
    if not problems:
        for name in sorted(manifest.files)[share::num_shares]:
            try:
                require_as_written(folder / name, manifest.files[name])
            except CheckpointError as fault:
                problems.append(str(fault))
    return problems


def file_fact(path: Path) -> FileFact:
    """The size and the hash of a file as it is."""
    try:
        with open_plain(path) as file:
            digest = hashlib.file_digest(file, _new_digest)  # type: ignore[arg-type]  # any function makes a digest
            return FileFact(os.fstat(file.fileno()).st_size, digest.hexdigest())
    except (OSError, Unreadable) as cause:
        raise CheckpointError(f"{path} can't be read: {cause}. {_WHAT_TO_DO}") from cause


def require_as_written(path: Path, fact: FileFact) -> None:
    """Raises: CheckpointError when the file is missing, truncated, or has another content than was written."""
    found = file_fact(path)
    if found.num_bytes != fact.num_bytes:
        size = found.num_bytes
        raise CheckpointError(f"{path} has {size:,} bytes, but was written with {fact.num_bytes:,}. {_WHAT_TO_DO}")
    if found != fact:
        raise CheckpointError(f"{path} is damaged: its content is not what was written. {_WHAT_TO_DO}")


def _quick_faults(folder: Path, manifest: Manifest | None = None) -> Iterator[str]:
    """Faults by names and sizes only: fast enough for each save."""
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


def _digest_of(content: dict[str, Any]) -> str:
    return _new_digest(json.dumps(content, sort_keys=True).encode()).hexdigest()


_WHAT_TO_DO = "Continue from another checkpoint (run.resume=FOLDER), or remove this one"
