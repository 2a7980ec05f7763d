"""The list of all keys, for `meshrl config` and for docs/config.md, which scripts/make_docs.py writes."""

from __future__ import annotations

import re

from meshrl.config.check import ONLY
from meshrl.config.other_frameworks import meanings, misspelt_meanings
from meshrl.config.run import RunConfig, SftRunConfig
from meshrl.config.schema import Key, all_keys, locate, meant_by, nearest
from meshrl.config.values import show


def every_key() -> dict[str, Key]:
    """The keys of all commands, by dotted path."""
    return all_keys(RunConfig) | all_keys(SftRunConfig)


def list_keys(word: str | None = None) -> str:
    """All keys with type, default and meaning. With `word`: the keys that it means as a name of another framework, the
    keys whose name contains it, then those whose text has it as a separate word; if there are none, the keys with
    the nearest names."""
    keys = every_key()
    paths = [path for path, key in keys.items() if "." in path and is_listed(key)]
    if word is None:
        return "\n".join(line for path in paths for line in _entry(path, keys))
    meant = meanings(word, keys)
    in_name = [path for path in paths if word.lower() in path.lower()]
    as_word = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    in_text = [path for path in paths if as_word.search(keys[path].text)]
    paths, lines = in_name + in_text, list[str]()
    if not paths and not meant:
        misspelt = [path for path in keys if meant_by(word, path.rpartition(".")[2].split("_"))]
        paths = nearest(keys, word) or misspelt
        meant = [] if paths else misspelt_meanings(word, keys)
        sections = ", ".join(path for path in keys if "." not in path)
        none = f" No key has a similar name. `meshrl config SECTION` lists the keys of one of {sections}."
        lines.append(f"no key contains {word!r}.{' Nearest:' if paths or meant else none}")
    for meaning in meant:
        for path in meaning.here:
            lines += _entry(path, keys)
        if not meaning.here or meaning.note or word.lower() != meaning.here[0].rpartition(".")[2]:
            lines.append(f"    {meaning}" if meaning.here else str(meaning))
    listed = {path for meaning in meant for path in meaning.here}
    return "\n".join(
        [*lines, *(line for path in dict.fromkeys(paths) if path not in listed for line in _entry(path, keys))]
    )


def _entry(path: str, keys: dict[str, Key]) -> list[str]:
    """The lines about one key."""
    key, _ = locate(keys, path)  # nearest() writes the user's own name where the list of keys has NAME
    assert key is not None
    default = "required" if key.default is None else f"default {key.default}"
    return [f"{path}   {key.allowed}   ({default})", f"    {key.text}{now_only(path)}"]


def is_listed(key: Key) -> bool:
    """Every key, and every section that has a text of its own; data.sources.NAME has none."""
    return not key.is_section or key.default is not None


def now_only(path: str) -> str:
    """The values that this version supports, where the key's type allows more."""
    if path not in ONLY:
        return ""
    possible, reason = ONLY[path]
    return f". Now only {' or '.join(show(value) for value in possible if value is not None)}: {reason}"
