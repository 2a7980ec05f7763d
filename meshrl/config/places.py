"""The file or folder that a value of the config names."""

from __future__ import annotations

import re
from pathlib import Path

from meshrl.config.source import Value
from meshrl.core.files import is_there

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def find(given: Value, folder: Path) -> tuple[Path | None, list[Path]]:
    """(the file or folder that a path names, places tried): relative to the config file, then the working folder."""
    try:
        path = Path(given.value).expanduser()
    except RuntimeError:  # ~name, where there is no such user
        path = Path(given.value)
    places = list(dict.fromkeys(start / path for start in (given.folder, folder, Path.cwd())))
    return next((place.resolve() for place in places if is_there(place)), None), places
