"""The table of per-token values, from the sampler to the loss, the log and the viewer.

A column that Sample, Batch or LossInputs has no field for is in its dict of further columns: `Sample.token_extras`,
`Batch.token_extras`, `LossInputs.columns`. So a new column is one row here, and the code that makes its values.
This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Maker = Literal["sampler", "flatten", "annotate", "algo", "update", "log"]
Reader = Literal["batch", "loss", "log", "view"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenColumn:
    """One value of each token.

    dtype: in a Batch and in the file of token values; None = as it was made. fill: where there is no value; None = all
    samples of a batch have the column or none has it, and the file has NaN.
    made_by: sampler = an array of Turn, or of `Turn.extras`; flatten = agent/flatten.py; annotate = a forward pass of
    the trainer before the update; algo = advantages and weights; update = the forward pass of the update, for the log
    only; log = monitor/token_log.py.
    read_by: batch = train/packing.py; loss = LossInputs; log = the file of token values, which has sampled tokens; view
    = the viewer's page, which reads this file. repeats: neighbouring tokens often have the same value, so that the file
    has it once.
    """

    name: str
    dtype: Any
    fill: float | None = None
    made_by: Maker
    read_by: tuple[Reader, ...] = ()
    repeats: bool = False


COLUMNS = (
    TokenColumn(name="tokens", dtype=np.int64, made_by="flatten", read_by=("batch",)),
    TokenColumn(name="mask", dtype=np.bool_, made_by="flatten", read_by=("batch",)),
    TokenColumn(name="turn", dtype=np.int16, fill=-1, made_by="flatten"),
    TokenColumn(name="rewards", dtype=np.float32, fill=0, made_by="flatten"),
    TokenColumn(name="routed_experts", dtype=None, fill=-1, made_by="sampler", read_by=("batch",)),
    # Code points of the turn's text that belong to the token; 0 = it continues the character that another one began.
    TokenColumn(name="characters", dtype=np.int32, made_by="log", read_by=("log", "view"), repeats=True),
    TokenColumn(
        name="rollout_logprobs",
        dtype=np.float32,
        fill=np.nan,
        made_by="sampler",
        read_by=("batch", "loss", "log", "view"),
    ),
    TokenColumn(name="versions", dtype=np.int32, fill=-1, made_by="sampler", read_by=("log", "view"), repeats=True),
    TokenColumn(name="old_logprobs", dtype=np.float32, made_by="annotate", read_by=("batch", "loss")),
    TokenColumn(name="ref_logprobs", dtype=np.float32, made_by="annotate", read_by=("batch", "loss")),
    # Of the weights before the step; with several updates in a step, entropies are of those before the token's update.
    TokenColumn(name="logprobs", dtype=np.float32, made_by="update", read_by=("log", "view")),
    TokenColumn(name="entropies", dtype=np.float32, made_by="update", read_by=("log", "view")),
    TokenColumn(
        name="advantages", dtype=np.float32, made_by="algo", read_by=("batch", "loss", "log", "view"), repeats=True
    ),
    TokenColumn(name="loss_weight", dtype=None, fill=0, made_by="algo", read_by=("batch",)),  # fp64 in tests
    TokenColumn(name="trained", dtype=np.bool_, fill=False, made_by="log", read_by=("log", "view")),  # part of the loss
)


def columns_for(reader: Reader) -> list[TokenColumn]:
    return [column for column in COLUMNS if reader in column.read_by]


def values_of(record: Any, name: str) -> Any:
    """A column of a Sample or a Batch; None if it has none."""
    return getattr(record, name) if hasattr(record, name) else record.token_extras.get(name)


def fill_of(name: str) -> float:
    """Where this column has no value; 0 if the table does not say it."""
    return next((column.fill for column in COLUMNS if column.name == name and column.fill is not None), 0)
