"""The one collective for values that are not tensors. The connections of torch.distributed are not authenticated, and
its own collectives for objects read pickles, which can run code; so values are sent as JSON.
"""

from __future__ import annotations

import json
from typing import TypeVar

import torch
import torch.distributed as dist

from meshrl.parallel.timing import timed_collective

T = TypeVar("T")


def all_gather_json(value: T) -> list[T]:
    """The value of every rank, in the order of the ranks (a collective, if there is a process group). It must equal
    what JSON makes of it: lists instead of tuples, and texts as keys of dicts."""
    if not dist.is_initialized():
        return [value]
    body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)  # never empty
    num_ranks = dist.get_world_size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
    with timed_collective("all_gather_json", body.expand(num_ranks, -1), num_ranks):
        dist.all_gather(lengths, torch.tensor([len(body)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(body)] = body
        bodies = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(bodies, padded)
    return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(bodies, lengths, strict=True)]
