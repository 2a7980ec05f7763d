"""Images of a row: files, bytes, data URLs and objects in memory, as RGB pixels. Nothing is fetched from a network.

The text of every DataError of this file follows the row's place.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from meshrl.core.errors import DataError
from meshrl.core.files import MAX_LINE_BYTES, Unreadable, open_plain
from meshrl.data.files import as_data_error

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # read by decoders without other programs
MAX_PIXELS = 1 << 26  # 8192 x 8192; decoded it takes 200 MB
THUMBNAIL_SIDE = 256  # pixels of the longest side
MAX_RATIO = 200  # of the sides; above it processors refuse an image, or round a side to nothing
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row before it is decoded. name: the path, or a digest of the content."""

    name: str
    content: bytes | Path | Image.Image

    def read(self) -> tuple[str, RowImage]:
        """A digest of the content, and the image with the bytes of its file. Raises: DataError."""
        if not isinstance(self.content, Path):
            return self.name, self
        with as_data_error(f"image {self.name!r}: "), open_plain(self.content) as file:
            data = file.read(MAX_LINE_BYTES + 1)
        if len(data) > MAX_LINE_BYTES:
            raise DataError(f"image {self.name!r}: more than {MAX_LINE_BYTES:,} bytes; make it smaller")
        return _name_of(data), RowImage(self.name, data)

    def require_header(self) -> None:
        """Raises: DataError for what the header shows: not an image, and a size that can't be used."""
        with self._opened():
            pass

    def pixels(self) -> tuple[Image.Image, bool]:
        """The RGB image, upright, on white where it is transparent; and whether it is the first of several frames.

        Raises: DataError for an image that can't be decoded completely.
        """
        with self._opened() as image:
            several = image.format in ("GIF", "WEBP", "PNG") and getattr(image, "is_animated", False)
            return _rgb(ImageOps.exif_transpose(image)), several

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        try:
            if isinstance(self.content, Image.Image):
                _require_size(self.content)
                yield self.content
                return
            file = open_plain(self.content) if isinstance(self.content, Path) else io.BytesIO(self.content)
            with file, Image.open(file, formats=FORMATS) as image:
                _require_size(image)
                yield image
        except Image.UnidentifiedImageError as cause:
            kinds = ", ".join(FORMATS)
            raise DataError(f"image {self.name!r} is not an image of the formats {kinds}; convert it") from cause
        except Image.DecompressionBombError as cause:  # far above MAX_PIXELS; raised before any pixel is decoded
            raise DataError(f"image {self.name!r}: its header states more than {MAX_PIXELS:,} pixels") from cause
        except (DataError, Unreadable) as cause:
            raise DataError(f"image {self.name!r}: {cause}") from cause
        except Exception as cause:  # decoders raise many kinds of errors for damaged files
            text = f"can't be decoded, it is damaged or incomplete ({type(cause).__name__}: {cause!s:.200})"
            raise DataError(f"image {self.name!r} {text}; restore it, or remove the row") from cause


def image_of(value: Any, folder: str | None) -> RowImage:
    """An image as data sets write it: a path, bytes, a data URL, a PIL image, or an object with `bytes` or `path`.

    folder: of the data file; paths are relative to it and stay below it. "" = a path from the working folder, anywhere;
    None = no paths.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path") or value.get("url") or value
    if isinstance(value, Image.Image):
        with RowImage(f"in memory, {value.size}", value)._opened():
            return RowImage(_name_of(f"{value.mode} {value.size}".encode() + value.tobytes()), value)
    if isinstance(value, bytes | bytearray) and value:
        return RowImage(_name_of(value), bytes(value))
    if not isinstance(value, str) or not value:
        wanted = "a path, bytes, a data URL, a PIL image, or an object with bytes or path"
        raise DataError(f"an image is {type(value).__name__} {value!r:.60}; it should be {wanted}")
    if value[:5].lower() == "data:":
        return _of_data_url(value)
    if _URL.match(value):
        raise DataError(f"image {value!r:.200} is a URL, and nothing is fetched: download it, and give its path")
    if folder is None:
        raise DataError(
            f"image {value!r:.200} is a path, but these rows have no folder; store the bytes in the data set"
        )
    root = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(root, value))
    if folder and not path.startswith(os.path.join(root, "")):
        raise DataError(f"image {value!r:.200} is not below {root}, the folder of the data file; copy or link it there")
    return RowImage(value, Path(path))


def thumbnail_of(image: Image.Image) -> bytes:
    """A JPEG file of the RGB image, with at most THUMBNAIL_SIDE pixels a side; about 20 kB for a photo."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    small.save(file, "JPEG", quality=95, subsampling=0)  # drawings keep their edges and colours
    return file.getvalue()


def _of_data_url(url: str) -> RowImage:
    head = _DATA_URL.match(url)
    try:
        if head is None:
            raise ValueError("it does not begin like data:image/png;base64,")
        data = base64.b64decode(url[head.end() :], validate=True)
    except ValueError as cause:
        raise DataError(f"image {url[:40]!r}... is not a base64 data URL of an image: {cause}") from cause
    return RowImage(_name_of(data), data)


def _name_of(data: bytes | bytearray) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:32]}"


def _require_size(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"its header states {width} x {height} pixels, more than {MAX_PIXELS:,}; make it smaller")
    if min(width, height) < 2 or max(width, height) > MAX_RATIO * min(width, height):
        limits = f"each side must have at least 2 pixels, and at most {MAX_RATIO} times those of the other"
        raise DataError(f"it has {width} x {height} pixels; {limits}")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise DataError("its pixels are floating-point numbers, whose range is not known; convert it to 8 bits")
    if image.mode.startswith("I"):  # 16 bits a pixel, which `convert` would cut off at 255
        values = np.asarray(image)
        wide = image.mode != "I" or values.max() > 255
        image = Image.fromarray((np.clip(values, 0, 65535) >> (8 * wide)).astype(np.uint8))
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)
    image.load()
    return image.convert("RGB")
