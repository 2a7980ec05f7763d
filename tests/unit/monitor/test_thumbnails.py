"""Thumbnails of the images in prompts: small, stored once, within a limit, and read back with their trajectory."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from tiny_vision import drawing

from meshrl.core.types import Media, Trajectory
from meshrl.data.images import THUMBNAIL_SIDE, thumbnail_of
from meshrl.monitor import thumbnails
from meshrl.monitor.rollout_log import RolloutLog, read_rollouts
from tests.made_runs import about_image, decode, image_media


def log_of(folder: Path, notes: list[str]) -> RolloutLog:
    return RolloutLog(folder, decode, note=notes.append)


def stored(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "rollouts" / "images").glob("*"))


def media_of(path: Path | None) -> list[Media]:
    assert path is not None
    return [logged.trajectory.prompt.media["image-0"] for logged in read_rollouts(path)]


@pytest.mark.parametrize("size", [(1000, 40), (32, 32), (300, 700)])
def test_a_thumbnail_is_small_has_the_images_shape_and_leaves_the_image_alone(size):
    image = drawing(*size)
    small = Image.open(io.BytesIO(thumbnail_of(image)))
    assert image.size == size and (small.format, small.mode) == ("JPEG", "RGB")
    assert max(small.size) == min(THUMBNAIL_SIDE, max(size))
    assert abs(small.width / small.height - size[0] / size[1]) < 0.05 * size[0] / size[1]


def test_each_image_is_stored_once_and_comes_back_with_every_attempt(tmp_path: Path):
    notes: list[str] = []
    log, one, other = log_of(tmp_path, notes), image_media("a", 1), image_media("b", 2)
    log.write(1, [about_image(one), about_image(one, index=1), about_image(other)])
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "rollouts" / "images").iterdir())]
    path = log.write(2, [about_image(one), about_image(one, index=1)])
    assert stored(tmp_path) == ["a", "b"] and notes == []
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "rollouts" / "images").iterdir())] == times
    assert media_of(path) == [replace(one, outputs={}, text="")] * 2


def test_images_beyond_the_limit_are_left_out_with_one_note_also_after_a_resume(tmp_path: Path, monkeypatch):
    notes: list[str] = []
    made = [image_media(name, i) for i, name in enumerate("abc")]
    monkeypatch.setattr(thumbnails, "MAX_BYTES", sum(len(each.thumbnail) for each in made[:2]))
    log = log_of(tmp_path, notes)
    for step, media in enumerate(made):
        log.write(step, [about_image(media)])
        assert len(notes) == (step == 2)
    log.write(3, [about_image(media) for media in made])
    log_of(tmp_path, notes).write(4, [about_image(image_media("d", 4))])
    assert stored(tmp_path) == ["a", "b"] and "has reached the limit of" in notes[0] and len(notes) == 2


def test_an_image_that_was_not_written_is_written_by_the_next_step(tmp_path: Path, monkeypatch):
    log, media = log_of(tmp_path, []), image_media("a", 1)
    with monkeypatch.context() as full:
        full.setattr(thumbnails, "replacing", lambda path: (_ for _ in ()).throw(OSError("disk full")))
        log.write(1, [about_image(media)])
    assert stored(tmp_path) == []
    log.write(2, [about_image(media)])
    assert stored(tmp_path) == ["a"]


@pytest.mark.parametrize("digest", ["gone", "../../step_000001", ""])
def test_a_thumbnail_that_is_gone_is_empty(digest: str, tmp_path: Path):
    path = log_of(tmp_path, []).write(1, [about_image(image_media("a", 1))])
    assert path is not None
    path.write_text(path.read_text().replace('"digest":"a"', f'"digest":"{digest}"'))
    (tmp_path / "step_000001.jpg").write_text("no image of this run")
    assert [media.thumbnail for media in media_of(path)] == [b""]


def test_text_runs_have_no_folder_of_images(tmp_path: Path):
    trajectory: Trajectory = about_image(image_media("a", 1))
    trajectory.prompt.media = {}
    log_of(tmp_path, []).write(1, [trajectory])
    assert [path.name for path in (tmp_path / "rollouts").iterdir() if path.is_dir()] == []
