"""Calls into the workers of an SGLang server, through its endpoint for weights; `loader.py` is the other end."""

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
    """One for each tensor-parallel rank of a server on this machine.

    finishing: what goes along with the next commit, the label of the version and whether to drop the prefix cache: in
    the very request after which the new weights are whole.
    """

    def __init__(self, post: Post, tp_size: int):
        self._post, self._tp_size = post, tp_size
        self._home = LeasedFolder()
        self._num_calls = 0
        self.finishing: dict[str, Any] = {}

    async def call(self, step: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a step of a sync in every worker; one answer from each. Raises: RequestError, EngineFailure."""
        self._num_calls += 1
        places = [self._home.path / f"{self._num_calls}.{rank}" for rank in range(self._tp_size)]
        body: dict[str, Any] = {
            "serialized_named_tensors": [_payload(step, arguments, place) for place in places],
            "load_format": LOADER,
            "flush_cache": False,
        }
        if step == "commit":
            body |= self.finishing
        await self._post("/update_weights_from_tensor", body)
        missing = [rank for rank, place in enumerate(places) if not place.is_file()]
        if missing:
            raise EngineFailure(
                f"SGLang's workers {missing} of {self._tp_size} did not answer {step}: they must run on this "
                "machine, with its temporary folder and its shared memory in sight"
            )
        answers = [json.loads(place.read_text()) for place in places]
        for place in places:
            place.unlink()
        return answers

    def close(self) -> None:
        self._home.close()


def _payload(step: str, arguments: dict[str, Any], answer: Path) -> str:
    """SGLang takes pickled [(name, tensor)] in base64, and unpickles tensors alone: the message is one, of bytes."""
    text = json.dumps({"step": step, "arguments": arguments, "answer": str(answer)}).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("meshrl", message)])).decode()
