"""The read-back proof of a sync in a server's worker: digests of the tensors are recorded when they are received, and
compared with digests of the parameters after loading."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from meshrl.rollout.server.name_map import Patch
from meshrl.sync.digest import as_bytes, digest_bytes, kind_for

Key = tuple[str, int]  # wire name, index of the patch among the patches of that name


class ReadBackDigests:
    """Digests of the blocks of one worker's parameters, for one version."""

    def __init__(self, patches: Mapping[str, list[Patch]], version: int):
        self.version = version
        self._patches = patches
        self._values: dict[Key, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def note(self, name: str, wire: torch.Tensor) -> None:
        """Record a received and verified tensor, on the device of the parameters."""
        self._dtypes[name] = wire.dtype
        for number, patch in enumerate(self._patches.get(name, ())):
            self._values[name, number] = _digest(patch.of_wire(wire))

    def differing(
        self, params: Mapping[str, torch.Tensor], before: ReadBackDigests | None, packed: Container[str] = ()
    ) -> list[str]:
        """An error text for each block that differs from the received one. before: digests of the last committed sync.

        params: parameters and buffers, by the engine's names. packed: parameters that may exist only as a packed copy;
        the caller compares that copy.
        """
        faults = []
        for name, own in self._patches.items():
            for number, patch in enumerate(own):
                param = params[patch.param]
                if param.numel() == 0 and patch.param in packed:
                    continue
                key = (name, number)
                if key not in self._values:
                    faults.append(f"{name} was not received")
                elif param.numel() == 0:
                    faults.append(f"{name} can't be read back: {patch.param} has no elements")
                elif (held := _digest(patch.of_parameter(param).to(self._dtypes[name]))) != self._values[key]:
                    faults.append(f"{name} {self._explain(key, held, before)}{self._cast(name, param)}")
        return faults

    def _cast(self, name: str, param: torch.Tensor) -> str:
        """For a buffer that the engine stores in another dtype: both dtypes."""
        sent = self._dtypes[name]
        return "" if param.dtype == sent else f" (sent as {sent}, stored as {param.dtype}, which may round the value)"

    def _explain(self, key: Key, held: int, before: ReadBackDigests | None) -> str:
        if before is not None and before._values.get(key) == held:
            return f"still has the values of version {before.version}"
        others = [name for (name, _), value in self._values.items() if value == held]
        if others:
            return f"has the values of {others[0]}"
        return f"has digest {held:016x}, the trainer's is {self._values[key]:016x}"


def _digest(block: torch.Tensor) -> int:
    return digest_bytes(kind_for(block.device), as_bytes(block.contiguous()))
