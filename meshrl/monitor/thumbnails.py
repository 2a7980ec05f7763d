"""Thumbnails of the images in a run's prompts, next to its rollouts: rollouts/images/DIGEST.jpg, each image once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from meshrl.core.files import replacing
from meshrl.core.types import Trajectory

FOLDER = "images"  # in rollouts/
MAX_BYTES = 200_000_000  # of a run's thumbnails, about 10,000 photos


class Thumbnails:
    """Writes the thumbnails of images that have no file yet, MAX_BYTES together. rollouts: the run's folder of
    rollouts. note: gets a sentence when the limit is reached."""

    def __init__(self, rollouts: Path, note: Callable[[str], None]):
        self._folder, self._note, self._is_full = rollouts / FOLDER, note, False
        self._sizes: dict[str, int] | None = None  # bytes of the files, by name

    def missing(self, trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
        """File names and contents of the thumbnails that `write` should write, within the limit."""
        media = {each.digest: each.thumbnail for t in trajectories for each in t.prompt.media.values()}
        if self._sizes is None and media:
            self._sizes = {path.name: path.stat().st_size for path in self._folder.glob("*.jpg")}
        sizes, chosen = self._sizes or {}, dict[str, bytes]()
        room = MAX_BYTES - sum(sizes.values())
        for digest, content in media.items():
            if content and f"{digest}.jpg" not in sizes:
                room -= len(content)
                if room < 0:
                    if not self._is_full:
                        limit = f"the limit of {MAX_BYTES / 1e6:.0f} MB"
                        self._note(f"{self._folder} has reached {limit}: the log has no thumbnails of further images")
                    self._is_full = True
                    break
                chosen[f"{digest}.jpg"] = content
        return chosen

    def write(self, missing: dict[str, bytes]) -> None:
        for name, content in missing.items():
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / name) as aside:
                aside.write_bytes(content)
            assert self._sizes is not None
            self._sizes[name] = len(content)


def read_thumbnail(rollouts: Path, digest: str) -> bytes:
    """b"" if the image has no thumbnail there. digest: of a log, so perhaps any text."""
    path = rollouts / FOLDER / f"{digest}.jpg"
    return path.read_bytes() if digest.isalnum() and path.is_file() else b""
