"""What meshrl adds to SGLang's workers: weights out of shared memory, by SGLang's own loader, and back for the proof.

The server is started with `--custom-weight-loader meshrl.rollout.sglang.loader.load`, SGLang's hook for loading in
another way. Each of its tensor-parallel workers then runs `load(model, named_tensors)` for a request to
/update_weights_from_tensor that names it as load_format. Of the tensors there is one, a message in bytes: method,
arguments, and a file for the answer, because the endpoint itself answers no more than "success". No weight is pickled
and none goes through HTTP.

Runs in SGLang's worker, in its one thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshrl.core.files import write_text
from meshrl.rollout.foreign.worker_weights import WorkerWeights

_WORKERS: dict[int, WorkerWeights] = {}  # by model: tests hold several ranks in one process


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Do what the message says, and write the answer, `{"error": text}` for what failed. Raises nothing: an exception
    here would end the server, and take its text along."""
    ((_, message),) = named_tensors
    order = json.loads(bytes(message.tolist()))
    weights = _WORKERS.get(id(model))
    if weights is None:
        weights = _WORKERS[id(model)] = WorkerWeights(model, f"sglang worker {os.getpid()}", _without_data)
    write_text(Path(order["answer"]), json.dumps(weights.call(order["step"], order["arguments"])))


@contextmanager
def _without_data(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The model with a twin without data in the place of each parameter and persistent buffer: {name: twin}, under the
    first of its names."""
    held = [
        (table, name, tensor)
        for layer in model.modules()
        for table in (layer._parameters, layer._buffers)
        for name, tensor in table.items()
        if tensor is not None and name not in layer._non_persistent_buffers_set
    ]
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    twins = {id(tensor): _bare(tensor) for _, _, tensor in held}
    try:
        for table, name, tensor in held:
            table[name] = twins[id(tensor)]
        yield {names[key]: twin for key, twin in twins.items()}
    finally:
        for table, name, tensor in held:
            table[name] = tensor


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Class and attributes of a tensor, among them SGLang's weight_loader, without its memory."""
    twin = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, requires_grad=False)
        twin.__class__ = type(tensor)
    twin.__dict__.update(tensor.__dict__)
    return twin
