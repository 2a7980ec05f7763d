"""meshrl's code in SGLang's workers: it reads weights from shared memory, loads them with SGLang's own loader, and
reads them back for the proof.

The server is started with `--custom-weight-loader meshrl.rollout.sglang.loader.load`, SGLang's hook for custom loaders.
Each tensor-parallel worker then runs `load(model, named_tensors)` for a request to /update_weights_from_tensor with
this load_format. named_tensors has one tensor, a message in bytes: step, arguments, and a file for the answer, because
the endpoint itself only answers "success". Weights are neither pickled nor sent through HTTP.

Runs in SGLang's worker, in its only thread.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrl.core.files import write_text
from meshrl.rollout.server.worker_weights import WorkerWeights

_WORKERS: dict[int, WorkerWeights] = {}  # by id of the model: a draft model is another one


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Run the step in the message, and write the answer, `{"error": text}` after a failure. Raises nothing: an
    exception here would end the server, and its text would be lost."""
    ((_, tensor),) = named_tensors
    message = json.loads(bytes(tensor.tolist()))
    weights = _WORKERS.get(id(model))
    if weights is None:
        number = dist.get_rank() if dist.is_initialized() else 0
        weights = WorkerWeights(model, f"sglang worker {os.getpid()}", make_placeholder, number)
        _WORKERS[id(model)] = weights
    write_text(Path(message["answer"]), json.dumps(weights.call(message["step"], message["arguments"])))


def make_placeholder(layer: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, with class and attributes of the given one, such as SGLang's weight_loader."""
    placeholder = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        placeholder = torch.nn.Parameter(placeholder, requires_grad=False)
        placeholder.__class__ = type(tensor)
    placeholder.__dict__.update(tensor.__dict__)
    return placeholder
