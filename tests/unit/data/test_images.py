"""Images of a row: where they may be, what becomes of their pixels, and which are refused."""

from __future__ import annotations

import base64
import io
import random
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_vision import drawing, encoded

from meshrl.core.errors import DataError
from meshrl.data.images import FORMATS, MAX_PIXELS, image_of


def pixels(value, folder=None) -> np.ndarray:
    image, _ = image_of(value, folder).pixels()
    assert image.mode == "RGB"
    return np.asarray(image)


def test_a_path_bytes_a_data_url_an_object_and_a_pil_image_are_the_same_image(tmp_path: Path):
    image = drawing()
    data = encoded(image)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    forms = [data, url, {"bytes": data, "path": None}, {"url": url}, image, "sub/a.png", {"path": "sub/a.png"}]
    forms.append(str(tmp_path / "sub" / "a.png"))
    for form in forms:
        assert (pixels(form, str(tmp_path)) == np.asarray(image)).all()
    named = [image_of(form, str(tmp_path)) for form in forms[:4]]
    assert len({each.name for each in named}) == 1, "equal bytes have equal names"
    assert len({each.read()[0] for each in named}) == 1


@pytest.mark.parametrize(
    ("value", "folder", "expected"),
    [
        ("https://example.com/a.png", "here", "is a URL, and nothing is fetched: download it"),
        ("file:///etc/passwd", "here", "is a URL"),
        ("../a.png", "here", "is not below .*here, the folder of the data file"),
        ("/etc/hostname", "here", "is not below"),
        ("/etc/hostname", "", "is not an image of the formats PNG"),  # the rows of a Python caller
        ("sub/../../a.png", "here", "is not below"),
        ("a.png", None, "these rows have no folder"),
        ("a.png", "here", "no such file"),
        (".", "here", "is not below|is a folder"),
        ("/dev/zero", "", "is a device"),
        ("data:text/plain,hello", None, "is not a base64 data URL"),
        ("data:image/png;base64,@@@", None, "is not a base64 data URL"),
        (7, None, "an image is int 7; it should be a path, bytes"),
        ({"width": 3}, None, "an image is dict"),
        ({"bytes": None, "path": None}, None, "an image is dict"),
        (b"", None, "an image is bytes b''"),
        (b"not an image", None, "is not an image of the formats PNG, JPEG"),
        (encoded(drawing(), "PPM"), None, "is not an image of the formats PNG, JPEG"),
        (encoded(drawing(), "PNG")[:200], None, "can't be decoded, it is damaged or incomplete .*; restore it"),
        (encoded(drawing(), "JPEG")[:-60], None, "can't be decoded"),
        (encoded(drawing(1, 1)), None, "it has 1 x 1 pixels; each side must have at least 2"),
        (encoded(drawing(20000, 1)), None, "it has 20000 x 1 pixels"),
        (encoded(drawing(3000, 3)), None, "it has 3000 x 3 pixels; .*at most 200 times"),
        (encoded(Image.new("F", (4, 4)), "TIFF"), None, "floating-point numbers"),
    ],
)
def test_what_is_no_usable_image_is_refused_with_the_reason(tmp_path, monkeypatch, value, folder, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(DataError, match=expected):
        image_of(value, folder).pixels()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header states this size, with a few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8193, 12000, 60000])
def test_a_decompression_bomb_is_refused_by_its_header(monkeypatch, side):
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("no pixel may be decoded"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None if side < 60000 else Image.MAX_IMAGE_PIXELS)
    data = bomb(side, side)
    assert len(data) < 200
    for check in ("pixels", "require_header"):
        with pytest.raises(DataError, match=f"its header states .*more than {MAX_PIXELS:,}"):
            getattr(image_of(data, None), check)()


def test_the_header_of_an_incomplete_image_is_accepted_without_its_pixels():
    image_of(encoded(drawing())[:200], None).require_header()
    with pytest.raises(DataError, match="it has 1 x 1"):
        image_of(encoded(drawing(1, 1)), None).require_header()


def test_an_image_is_turned_upright():
    image = drawing(8, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert (pixels(encoded(image, "PNG", exif=exif)) == np.rot90(np.asarray(image), -1)).all()


def test_transparent_pixels_are_white():
    colours = np.zeros((4, 4, 4), np.uint8)
    colours[0, 0] = [200, 10, 30, 255]
    seen = pixels(encoded(Image.fromarray(colours)))
    assert seen[0, 0].tolist() == [200, 10, 30] and (seen[1:] == 255).all()
    grey = pixels(encoded(Image.fromarray(colours).convert("LA")))
    assert (grey[1:] == 255).all() and len({*grey[0, 0].tolist()}) == 1
    palette = Image.new("P", (4, 4))
    palette.putpalette([9, 8, 7, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert pixels(encoded(palette))[0, :2].tolist() == [[9, 8, 7], [40, 50, 60]]
    assert pixels(encoded(palette, transparency=0))[0, :2].tolist() == [[255] * 3, [40, 50, 60]]


def test_grey_images_and_those_of_16_bits_keep_their_range():
    ramp = np.linspace(0, 255, 16, dtype=np.uint8).reshape(4, 4)
    assert (pixels(encoded(Image.fromarray(ramp)))[:, :, 1] == ramp).all()
    deep = Image.fromarray((ramp.astype(np.uint16) << 8) + 5)
    assert deep.mode == "I;16"
    assert (pixels(encoded(deep))[:, :, 0] == ramp).all()
    assert (pixels(encoded(deep, "TIFF"))[:, :, 0] == ramp).all()
    wide = Image.fromarray(ramp.astype(np.int32))
    assert (pixels(encoded(wide, "TIFF"))[:, :, 0] == ramp).all(), "32 bits with small values"
    assert pixels(encoded(Image.fromarray(ramp > 100)))[3, 3].tolist() == [255] * 3


def test_cmyk_becomes_rgb():
    red = Image.new("RGB", (16, 16), (220, 20, 20)).convert("CMYK")
    assert red.mode == "CMYK"
    seen = pixels(encoded(red, "JPEG", quality=95))[8, 8]
    assert np.abs(seen - np.array([220, 20, 20])).max() < 12


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        image, several = image_of(data, None).pixels()
        assert several and np.asarray(image)[4, 4].tolist() == [255, 0, 0]
    assert not image_of(encoded(drawing()), None).pixels()[1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of damaged TIFF
def test_damaged_images_are_refused_or_valid():
    rng, started = random.Random(0), time.monotonic()
    base = {kind: encoded(drawing(32, 24), kind) for kind in FORMATS}
    results = []
    for number in range(300):
        data = bytearray(base[FORMATS[number % len(FORMATS)]])
        if rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            results.append(pixels(bytes(data)).shape[2] == 3)
        except DataError:
            results.append(None)
    assert time.monotonic() - started < 10
    assert results.count(None) > 100 and results.count(True) > 50


def test_an_image_that_pillow_has_opened_lazily_is_checked_too():
    damaged = Image.open(io.BytesIO(encoded(drawing())[:200]))
    with pytest.raises(DataError, match=r"image 'in memory, .*can't be decoded"):
        image_of(damaged, None)
