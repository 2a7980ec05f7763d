"""Folders of compiled code that no other user can write. By default PyTorch loads such code from a folder of the
system's temporary folder whose name is known, and which another user can create first."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from meshrl.core.files import is_private
from meshrl.process.leases import LeasedFolder

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "QUACK_CACHE_DIR": "quack"}
"""Environment variable -> name of its folder. Triton, vLLM and FlashInfer have theirs in the user's home."""
_temporary: LeasedFolder | None = None  # in place of a home that can't be written


def use_private_caches() -> None:
    """Set the variables for this process and those that it starts. A folder that the user has set stays; PyTorch sets
    its default when it is imported."""
    for name, folder in CACHES.items():
        value = os.environ.get(name)
        if not value or value.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
            os.environ[name] = str(_home() / folder)


def _home() -> Path:
    """The folder meshrl in the user's cache, or a temporary folder of this process."""
    global _temporary
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "meshrl"
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(path) and os.access(path, os.W_OK):
        return path
    _temporary = _temporary or LeasedFolder()
    return _temporary.path
