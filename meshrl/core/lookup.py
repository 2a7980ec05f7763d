"""From a name in the config to its object: an entry of a table of built-in choices, or a user-defined object by its
dotted path.

This file imports the standard library only, because reward workers import it when they start.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshrl.core.errors import ConfigError

DOTTED_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def look_up(name: str, table: Mapping[str, Any], key: str) -> Any:
    """The entry `name` of the table, or the object of a dotted path `package.module:name`.

    Modules are looked for in the working folder and on Python's path, which has the folder of the config file. key: the
    name of the value in errors, such as the config's key "agent.kind". Raises: ConfigError when there is no such entry,
    module or object.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(
            f"{key} is {name!r}; allowed: {', '.join(table)}, or a dotted path package.module:name"
            f"{did_you_mean(name, table)}"
        )
    try:
        return import_object(name)
    except ConfigError as error:
        raise ConfigError(f"{key} is {name!r}: {error}") from error.__cause__


def import_object(path: str) -> Any:
    """The object of `package.module:name`; importing its module runs user code.

    Raises: ConfigError, which does not repeat the path.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except MemoryError:
        raise  # not a fault of the path
    except (Exception, SystemExit) as error:  # user code: importing it may raise anything
        raise ConfigError(
            f"importing {module_name!r} raised {type(error).__name__}: {error}; a module is looked for in the working "
            "folder, on PYTHONPATH and in the folder of the config file (run.module_folder)"
        ) from error
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        location = getattr(module, "__file__", None) or f"module {module_name}"
        raise ConfigError(f"{location} has no {name!r}{did_you_mean(name, public)}") from error


def code_of(path: str, given: Any = None) -> str:
    """The text of the code behind a name in the config, without comments and layout: the module of a dotted path, the
    version of meshrl for a built-in name, or the function or class `given` by a Python caller; "" if there is none."""
    text: str | None = None
    try:
        if given is not None:
            text = inspect.getsource(given if hasattr(given, "__qualname__") else type(given))
        elif ":" not in path:
            from importlib.metadata import version  # takes as long as the rest of a reward worker's standard library

            return version("meshrl")
        elif (spec := importlib.util.find_spec(path.partition(":")[0])) and str(spec.origin).endswith(".py"):
            text = importlib.util.decode_source(Path(str(spec.origin)).read_bytes())
        return _without_layout(textwrap.dedent(text or ""))
    except (ImportError, OSError, TypeError, ValueError, SyntaxError):  # no text, or one line of a longer expression
        return text or ""


def _without_layout(text: str) -> str:
    for _ in range(9):
        # Python before 3.11.5 counts the depth of the trees that all threads make at this moment together.
        with suppress(SystemError):
            return ast.unparse(ast.parse(text))
    return text


def can_be_imported(path: str) -> bool:
    """Whether the first package of `package.module:name` is installed or in the working folder. The rest of the path is
    known only after the import, which runs the package's code."""
    top = re.split("[.:]", path)[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
    return top in sys.modules or here is not None or importlib.util.find_spec(top) is not None


def similar_names(name: str, names: Iterable[str], count: int = 3, least: float = 0.45) -> list[str]:
    """The known names that are most similar to `name`, best first; case does not matter. least: the similarity, 0 to 1,
    from which a name is listed."""
    by_lower = {each.lower(): each for each in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, count, least)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'nearest'?`, or an empty text when no known name is similar."""
    return "".join(f"; did you mean {nearest!r}?" for nearest in similar_names(name, names, 1))
