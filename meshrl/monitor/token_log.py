"""The values of each sampled token of a step, in columns: step_000012.tokens.parquet, next to step_000012.jsonl.

It has a row for each turn of each trajectory, with lists of R values, R sampled tokens of the turn: the columns of
core/columns.py that are read by `log`. Row groups are small, so that the tokens of one answer are read without the
rest. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.core.columns import TokenColumn, columns_for, values_of
from meshrl.core.errors import DataError
from meshrl.core.files import is_there, replacing
from meshrl.core.types import Sample, Trajectory

_TOKENS_OF_A_GROUP = 1 << 16
_MAX_PENDING = 32  # tokens of one character, or of bytes that are no text


@dataclass(frozen=True, slots=True)
class TokenValues:
    """The tokens of one turn: an array [R] for each column. trainer_version: of the weights that scored them; None
    if they were not trained. place: the tokens' place in the file."""

    turn: int
    trainer_version: int | None
    columns: dict[str, np.ndarray]
    place: slice


@dataclass(kw_only=True, slots=True)
class TrainerValues:
    """What the trainer computed in one step. version: of its weights before the step. values: for each trained token of
    a sample its logprob and entropy, float32[2, n], by trajectory and row."""

    version: int
    samples: Sequence[Sample]
    values: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def add(self, samples: Sequence[Sample], values: dict[int, np.ndarray]) -> None:
        """Values of one update, by index in its samples."""
        self.values |= {(samples[i].trajectory_id, samples[i].row): array for i, array in values.items()}

    def by_turn(self) -> dict[tuple[str, int], dict[str, np.ndarray]]:
        """The known columns of the trainer, by trajectory and turn. Logprobs of the weights before the step are
        preferred."""
        by_turn, own = {}, ("flatten", "annotate", "algo")
        made = [column.name for column in columns_for("log") if column.made_by in own]
        for sample in self.samples:
            places = sample.mask.nonzero()[0]
            if not len(places):
                continue
            turns = sample.turn[places]
            columns = {name: x[places] for name in made if (x := values_of(sample, name)) is not None}
            scored = self.values.get((sample.trajectory_id, sample.row))
            if scored is not None:
                columns["logprobs"], columns["entropies"] = scored
            if sample.old_logprobs is not None:
                columns["logprobs"] = sample.old_logprobs[places]
            if sample.loss_weight is not None:
                columns["trained"] = sample.loss_weight[places] != 0
            ends = [*((turns[1:] != turns[:-1]).nonzero()[0] + 1).tolist(), len(places)]
            for begin, end in zip([0, *ends], ends):
                cut = {name: array[begin:end] for name, array in columns.items()}
                by_turn[sample.trajectory_id, int(turns[begin])] = cut
        return by_turn


class _Pieces(dict[int, str]):
    """The text of each token, which `decode` gives when it is needed for the first time."""

    def __init__(self, decode: Callable[[np.ndarray], str]):
        self._decode = decode

    def __missing__(self, number: int) -> str:
        piece = self[number] = self._decode(np.array([number], np.int32))
        return piece


class TokenTexts:
    """Divides the text of a turn among its tokens. decode: ids int32[R] -> text."""

    def __init__(self, decode: Callable[[np.ndarray], str]):
        self._decode = decode
        self._pieces, self._first = _Pieces(self._after), _Pieces(decode)  # after another token, at the begin of a text
        self._anchor: tuple[np.ndarray, str] | None = None

    def characters(self, ids: np.ndarray, text: str) -> np.ndarray:
        """The code points of `text` that belong to each token, int32[R]; their sum is the text's length.

        A character of several tokens belongs to the first of them. Bytes that are no text may belong to a token nearby.
        """
        if not len(ids):
            return np.zeros(0, np.int32)
        numbers = ids.tolist()
        first = self._first[numbers[0]]
        if self._anchor is None and first and "\ufffd" not in first:
            self._anchor = ids[:1].copy(), first
        pieces = [first, *map(self._pieces.__getitem__, numbers[1:])]
        if "".join(pieces) == text:
            return np.fromiter(map(len, pieces), np.int32, len(pieces))
        return self._walk(ids, pieces, text)

    def _after(self, ids: np.ndarray) -> str:
        """The text of these tokens after another token."""
        if self._anchor is None:
            return self._decode(ids)
        before, text = self._anchor
        return self._decode(np.concatenate([before, ids])).removeprefix(text)

    def _walk(self, ids: np.ndarray, pieces: list[str], text: str) -> np.ndarray:
        """Token by token: several are decoded together until they give complete characters."""
        lengths, at, begin = np.zeros(len(ids), np.int32), 0, 0
        for k, piece in enumerate(pieces):
            if k > begin:
                piece = (self._after if begin else self._decode)(ids[begin : k + 1])
            if "\ufffd" not in piece[-1:] or k - begin == _MAX_PENDING:
                if text.startswith(piece, at):
                    lengths[begin], at, begin = len(piece), at + len(piece), k + 1
                elif k - begin >= _MAX_PENDING:
                    break
        lengths[min(begin, len(ids) - 1)] += len(text) - at
        return lengths


def tokens_file(path: Path) -> Path:
    """The file of token values next to a file of rollouts."""
    return path.with_name(f"{path.name.partition('.')[0]}.tokens.parquet")


def write_tokens(
    path: Path,
    trajectories: Sequence[Trajectory],
    texts: Sequence[Sequence[str]],
    split: TokenTexts,
    trainer: TrainerValues | None,
) -> None:
    """Write the file of a step, which replaces an earlier one. texts: of each turn of each trajectory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    trained = trainer.by_turn() if trainer is not None else {}
    rows = [(t.id, i, turn) for t in trajectories for i, turn in enumerate(t.turns)]
    table = columns_for("log")
    lists: dict[str, list[np.ndarray]] = {column.name: [] for column in table}
    for (name, i, turn), text in zip(rows, chain.from_iterable(texts), strict=True):
        size = len(turn.output_ids)
        values = {
            **turn.extras,
            "characters": split.characters(turn.output_ids, text),
            "rollout_logprobs": turn.logprobs,
            "versions": turn.versions,
            **trained.get((name, i), {}),
        }
        for column in table:
            array = values.get(column.name)  # turns of failed attempts are not checked
            if not isinstance(array, np.ndarray) or array.shape != (size,) or array.dtype.kind == "O":
                array = _missing(column, size)
            lists[column.name].append(array)
    ends = np.cumsum([0, *(len(turn.output_ids) for _, _, turn in rows)], dtype=np.int32)
    flat: dict[str, np.ndarray] = {
        c.name: np.concatenate([np.zeros(0, c.dtype), *lists[c.name]]).astype(c.dtype) for c in table
    }
    version = -1 if trainer is None else trainer.version
    columns: dict[str, Any] = {
        "trajectory": pa.array([_key(name) for name, _, _ in rows], pa.binary()),
        "turn": pa.array([i for _, i, _ in rows], pa.int32()),
        "trainer_version": pa.array([version if (n, i) in trained else -1 for n, i, _ in rows], pa.int32()),
        **{name: pa.ListArray.from_arrays(pa.array(ends), pa.array(array)) for name, array in flat.items()},
    }
    element = "{}.list.element".format
    repeated = [element(column.name) for column in table if column.repeats]
    noisy = [element(column.name) for column in table if column.dtype == np.float32 and not column.repeats]
    with replacing(path) as aside:
        pq.write_table(
            pa.table(columns),
            aside,
            row_group_size=max(1, len(rows) * _TOKENS_OF_A_GROUP // max(1, int(ends[-1]))),
            compression="zstd",
            use_dictionary=["trajectory", "turn", "trainer_version", *repeated],
            column_encoding=dict.fromkeys(noisy, "BYTE_STREAM_SPLIT"),
            write_statistics=False,
            store_schema=False,
        )


def _missing(column: TokenColumn, size: int) -> np.ndarray:
    return np.full(size, np.nan if column.fill is None else column.fill, column.dtype)


def _key(trajectory: str) -> bytes:
    """An id as bytes: ids come from the user's rows, and may have half surrogates."""
    return trajectory.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class TokenFile:
    """All tokens of a file, end to end. rows: (trajectory, turn) -> number of its row, whose tokens are those from
    ends[row] to ends[row + 1]. versions: the trainer_version of each row, -1 = not trained."""

    rows: dict[tuple[str, int], int]
    versions: np.ndarray
    ends: np.ndarray
    columns: dict[str, np.ndarray]

    def turn(self, trajectory: str, turn: int) -> TokenValues | None:
        row = self.rows.get((trajectory, turn))
        if row is None:
            return None
        place, version = slice(self.ends[row], self.ends[row + 1]), int(self.versions[row])
        cut = {name: array[place] for name, array in self.columns.items()}
        return TokenValues(turn, None if version < 0 else version, cut, place)


def read_token_file(path: Path) -> TokenFile | None:
    """All tokens of a step; None if there is no such file. path: of the step's rollouts, or of its token values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tokens_file(path)
    if not is_there(path):
        return None
    try:
        with pq.ParquetFile(path) as file:
            read = file.read(["trajectory", "turn", "trainer_version", *(c.name for c in columns_for("log"))])
        table = read.combine_chunks()
        ends, columns = table["characters"].combine_chunks().offsets.to_numpy(), {}
        for column in columns_for("log"):
            if column.name not in table.column_names:  # the file is older than the column
                columns[column.name] = _missing(column, int(ends[-1]))
                continue
            lists = table[column.name].combine_chunks()
            values = lists.values.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
            if not np.array_equal(lists.offsets.to_numpy(), ends) or len(values) != ends[-1]:
                raise ValueError(f"the lists of {column.name} have other lengths than those of characters")
            columns[column.name] = values
        keys = zip(table["trajectory"].to_pylist(), table["turn"].to_pylist(), strict=True)
        rows = {(name.decode("utf-8", "surrogatepass"), turn): row for row, (name, turn) in enumerate(keys)}
        return TokenFile(rows, table["trainer_version"].to_numpy(), ends, columns)
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as cause:
        raise DataError(f"{path}: no file of token values: {type(cause).__name__}: {cause!s:.200}") from cause
