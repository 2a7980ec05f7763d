"""Damaged and malicious files: cut, with flipped bits, edited, or replaced by something that is not a file.

All damage follows from a seed. MESHRL_FUZZ_ROUNDS=50 makes fifty rounds of the random part, `make test` a third of one.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROUNDS = float(os.environ.get("MESHRL_FUZZ_ROUNDS", "1"))
_STRUCTURE = re.compile(rb'[{}\[\],:"\n]')


def rounds_of(count: int) -> int:
    """How often to make random damage that one round has `count` times."""
    return max(1, round(count * _ROUNDS))


@dataclass(frozen=True, slots=True)
class Damage:
    """One kind of damage. put: damages the intact file at a path.

    kind: harmless (must be read as if it were intact), doubtful (the same, or refused), cut, content, place.
    """

    name: str
    kind: str
    put: Callable[[Path], None]


def written(name: str, kind: str, data: bytes) -> Damage:
    def put(path: Path) -> None:
        path.unlink()
        path.write_bytes(data)

    return Damage(name, kind, put)


def of_text(data: bytes, seed: int, mark: str = "harmless") -> Iterator[Damage]:
    """Damage to any text file; of_json has the damage for JSON parsers. mark: the kind of a byte order mark."""
    yield from cuts(data, seed, [found.start() for found in _STRUCTURE.finditer(data)])
    yield from flips(data, seed)
    yield written("a byte order mark before it", mark, b"\xef\xbb\xbf" + data)
    yield written("CRLF line ends", "harmless", data.replace(b"\n", b"\r\n"))
    yield written("UTF-16", "content", data.decode().encode("utf-16"))
    rng = random.Random(seed)
    for what, inserted in (("NUL", b"\0"), ("a byte that is not UTF-8", b"\xff"), ("a control character", b"\x1b[2J")):
        at = rng.randrange(len(data))
        yield written(f"{what} at byte {at}", "content", data[:at] + inserted + data[at:])
    yield written("noise after its end", "content", data + bytes(rng.randrange(256) for _ in range(64)))
    yield written("only noise", "content", bytes(rng.randrange(256) for _ in range(512)))
    yield written("zeros of its length", "content", bytes(len(data)))
    yield written("100,000 nested lists", "content", b"[" * 100_000)
    yield written("100,000 nested objects", "content", b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


def cuts(data: bytes, seed: int, marks: list[int], count: int = 8) -> Iterator[Damage]:
    """The file ends too early: at its structural bytes and one byte after them."""
    rng = random.Random(seed)
    chosen = {0, 1, len(data) - 1, len(data) // 2}
    for mark in rng.sample(marks, min(rounds_of(count), len(marks))):
        chosen |= {mark, mark + 1}
    for at in sorted(at for at in chosen if at < len(data)):
        yield written(f"cut at byte {at} of {len(data)}", "cut", data[:at])


def flips(data: bytes, seed: int, count: int = 12, within: int | None = None) -> Iterator[Damage]:
    """One flipped bit at a time, in the first `within` bytes."""
    rng = random.Random(seed)
    for _ in range(rounds_of(count)):
        at, bit = rng.randrange(min(within or len(data), len(data))), rng.randrange(8)
        flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        yield written(f"bit {bit} of byte {at} flipped", "content", flipped)


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**18, 10**40, -(10**40), 0.5, float("inf"), float("nan")),
    *("", "x" * 100_000, "../../../etc/passwd", "\0", "\ud800", "{{ 1 }}", [], {}, [[]], {"": {}}, ["x"] * 1000),
)


def of_json(data: bytes, seed: int, count: int = 30, mark: str = "harmless") -> Iterator[Damage]:
    """Other values, missing keys and keys that occur twice, anywhere in a file with one JSON object."""
    rng = random.Random(seed)
    yield from of_text(data, seed, mark)
    places = list(_places(json.loads(data)))
    for _ in range(rounds_of(count)):
        where, odd = rng.choice(places), rng.choice(ODD_VALUES)
        yield written(f"{where} = {odd!r:.40}", "content", _with(data, where, odd))
    for where in rng.sample(places, min(len(places), rounds_of(count // 2))):
        yield written(f"no {where}", "content", _with(data, where, _REMOVED))
    names = [where[-1] for where in places if isinstance(where[-1], str) and json.dumps(where[-1]).encode() in data]
    for name in rng.sample(names, min(rounds_of(4), len(names))):
        key = json.dumps(name).encode()
        yield written(f"{name} twice", "content", data.replace(key, key + b": 1, " + key, 1))
    yield written("digits without end", "content", data.replace(b"{", b'{"n": ' + b"9" * 5000 + b", ", 1))
    yield written("an object of another kind", "content", b'{"a": 1}')
    yield written("a list", "content", b"[]")
    yield written("null", "content", b"null")


def of_place() -> Iterator[Damage]:
    """Something that is not a file, in place of the file. A reader must neither hang nor read without end."""

    def put(make: Callable[[Path], Any]) -> Callable[[Path], None]:
        def damage(path: Path) -> None:
            path.unlink()
            make(path)

        return damage

    yield Damage("nothing there", "place", put(lambda path: None))
    yield Damage("a folder", "place", put(lambda path: path.mkdir()))
    yield Damage("a pipe", "place", put(lambda path: os.mkfifo(path)))
    yield Damage("a link to itself", "place", put(lambda path: path.symlink_to(path.name)))
    yield Damage("a link to nowhere", "place", put(lambda path: path.symlink_to("nowhere")))
    yield Damage("a device without end", "place", put(lambda path: path.symlink_to("/dev/zero")))
    # No user can read it, not even root: its first page is not mapped.
    yield Damage("a file that can't be read", "place", put(lambda path: path.symlink_to("/proc/self/mem")))


_REMOVED = object()


def _places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*where, key)
        yield from _places(entry, (*where, key))


def _with(data: bytes, where: tuple[Any, ...], value: Any) -> bytes:
    content = json.loads(data)
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    if value is _REMOVED:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    return json.dumps(content).encode()
