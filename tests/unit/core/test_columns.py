"""The table of per-token values: a new column is one row."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_agent import IdTokenizer, scripted_trajectories
from tiny_run import read_tokens

from meshrl.agent.flatten import flatten
from meshrl.algo.advantages import assign_advantages
from meshrl.algo.losses import LossInputs, make_policy_loss
from meshrl.config.algo import AlgoConfig
from meshrl.core import columns
from meshrl.core.batch import Outputs
from meshrl.core.columns import COLUMNS, TokenColumn, values_of
from meshrl.core.types import Sample
from meshrl.monitor.rollout_log import RolloutLog
from meshrl.monitor.token_log import TrainerValues, tokens_file
from meshrl.tools.viewer.page import write_view
from meshrl.train.packing import pack

VALUES = TokenColumn(name="values", dtype=np.float32, made_by="annotate", read_by=("batch", "loss", "log", "view"))
SURPRISE = TokenColumn(name="surprise", dtype=np.float32, fill=-1, made_by="sampler", read_by=("batch", "log"))


def test_every_array_of_a_sample_is_in_the_table():
    arrays = {field.name for field in fields(Sample) if str(field.type).startswith("np.ndarray")}
    of_sample = {column.name for column in COLUMNS if column.name in Sample.__slots__}
    assert arrays == of_sample and len({column.name for column in COLUMNS}) == len(COLUMNS)


def of_values(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return inputs.columns["values"] * inputs.logprobs, {}


def test_a_column_that_is_added_as_a_row_arrives_in_batch_loss_log_and_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(columns, "COLUMNS", (*COLUMNS, VALUES, SURPRISE))
    trajectories = scripted_trajectories(1, 1)
    for turn in trajectories[0].turns:
        turn.extras["surprise"] = 2 * turn.logprobs
    samples, _ = flatten(trajectories)
    assign_advantages(samples, AlgoConfig())
    for sample in samples:
        sample.loss_weight = sample.mask.astype(np.float32)
        sample.token_extras["values"] = np.arange(len(sample)) / 4.0
    batch = pack(samples, range(len(samples)), share_prefix=False)
    for name in ("values", "surprise"):
        np.testing.assert_array_equal(batch.token_extras[name], np.concatenate([s.token_extras[name] for s in samples]))
    assert batch.token_extras["values"].dtype == torch.float32 and (batch.token_extras["surprise"] == -1).any()

    outputs = Outputs(logprobs=torch.full([batch.num_tokens], 3.0, requires_grad=True))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    loss, _ = make_policy_loss(AlgoConfig(loss={"kind": f"{Path(__file__).stem}:of_values"}))(outputs, batch)
    assert loss.item() == 3.0 * float(batch.token_extras["values"][batch.trained].sum())

    path = RolloutLog(tmp_path, IdTokenizer().decode).write(
        1, trajectories, trainer=TrainerValues(version=0, samples=samples)
    )
    of_turns = read_tokens(path, trajectories[0].id)
    for number, turn in enumerate(trajectories[0].turns):
        sample = next(s for s in samples if (s.mask & (s.turn == number)).any())
        np.testing.assert_array_equal(of_turns[number].columns["surprise"], 2 * turn.logprobs)
        np.testing.assert_array_equal(
            of_turns[number].columns["values"], values_of(sample, "values")[sample.mask & (sample.turn == number)]
        )

    write_view(tmp_path)
    text = (tmp_path / "view.html").read_text()
    index = json.loads(re.search(r'id="index">(.*?)</script>', text)[1])
    data = zlib.decompress(base64.b64decode(re.search(r'id="values0">(.*?)</script>', text)[1]))
    size = sum(len(turn.columns["values"]) for turn in of_turns)
    shown = np.frombuffer(data, "<f4", size, offset=8 * size)
    assert index["columns"] == ["values"]
    np.testing.assert_array_equal(np.sort(shown), np.sort(np.concatenate([t.columns["values"] for t in of_turns])))

    newer = TokenColumn(name="newer", dtype=np.int32, fill=7, made_by="algo", read_by=("log",))
    monkeypatch.setattr(columns, "COLUMNS", (*COLUMNS, newer))
    assert tokens_file(path).exists() and (read_tokens(path, trajectories[0].id)[0].columns["newer"] == 7).all()
