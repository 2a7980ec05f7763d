"""Where a value of the config leads: to a file or folder, to the hub, to a function in a module."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path

from meshrl.config.source import Value
from meshrl.core.files import is_there

DOTTED_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def find(given: Value, folder: Path) -> tuple[Path | None, list[Path]]:
    """(the file or folder a path names, the places looked at): beside the config file, then the working folder."""
    try:
        path = Path(given.value).expanduser()
    except RuntimeError:  # ~name of nobody
        path = Path(given.value)
    places = list(dict.fromkeys(start / path for start in (given.folder, folder, Path.cwd())))
    return next((place.resolve() for place in places if is_there(place)), None), places


def can_be_imported(module: str) -> bool:
    """Whether the module's first package is there. What lies in it shows only when its code runs."""
    top = module.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    return top in sys.modules or here is not None or importlib.util.find_spec(top) is not None
