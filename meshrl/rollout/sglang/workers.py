"""Calls into the workers of an SGLang server, through its endpoint for weights. `loader.py` runs in the workers."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from meshrl.core.errors import EngineFailure
from meshrl.process.leases import LeasedFolder

LOADER = "meshrl.rollout.sglang.loader.load"

Post = Callable[[str, Any], Awaitable[Any]]


class Workers:
    """The workers of a server on this machine, one for each tensor-parallel rank.

    commit_fields: sent with the next commit, the request that completes the new weights: the label of the version, and
    whether to drop the prefix cache.
    """

    def __init__(self, post: Post, tp_size: int):
        self._post, self._tp_size = post, tp_size
        self._folder_lease = LeasedFolder()
        self._num_calls = 0
        self.commit_fields: dict[str, Any] = {}

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a step of a sync in every worker; returns one answer from each. Raises: RequestError, EngineFailure."""
        self._num_calls += 1
        answer_files = [self._folder_lease.path / f"{self._num_calls}.{rank}" for rank in range(self._tp_size)]
        body: dict[str, Any] = {
            "serialized_named_tensors": [_payload(step, arguments, file) for file in answer_files],
            "load_format": LOADER,
            "flush_cache": False,
        }
        if step == "commit":
            body |= self.commit_fields
        await self._post("/update_weights_from_tensor", body)
        missing = [rank for rank, file in enumerate(answer_files) if not file.is_file()]
        if missing:
            raise EngineFailure(
                f"SGLang's workers {missing} of {self._tp_size} did not answer {step}: they must run on this "
                "machine, with access to its temporary folder and its shared memory"
            )
        answers = [json.loads(file.read_text()) for file in answer_files]
        for file in answer_files:
            file.unlink()
        return answers

    def close(self) -> None:
        self._folder_lease.close()


def _payload(step: str, arguments: dict[str, Any], answer: Path) -> str:
    """SGLang takes a pickled [(name, tensor)] in base64, and unpickles only tensors, so the message is a uint8
    tensor."""
    text = json.dumps({"step": step, "arguments": arguments, "answer": str(answer)}).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("meshrl", message)])).decode()
