"""The second proof of a sync in an engine's own worker: what its parameters should hold is noted as it arrives, and
compared with what they do hold once everything is loaded."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from meshrl.rollout.foreign.name_map import Patch
from meshrl.sync.digest import as_bytes, digest_bytes, kind_for

Key = tuple[str, int]  # wire name, number of the patch among those of the name


class Resident:
    """The blocks of one worker's parameters under one version."""

    def __init__(self, patches: Mapping[str, list[Patch]], version: int):
        self.version = version
        self._patches = patches
        self._values: dict[Key, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def note(self, name: str, wire: torch.Tensor) -> None:
        """A tensor that has arrived, proven, on the device of the parameters."""
        self._dtypes[name] = wire.dtype
        for number, patch in enumerate(self._patches.get(name, ())):
            self._values[name, number] = _digest(patch.of(wire))

    def differing(
        self, params: Mapping[str, torch.Tensor], before: Resident | None, packed: Container[str] = ()
    ) -> list[str]:
        """What is wrong with each block that is not as it arrived. before: of the last sync that was committed.

        params: parameters and buffers, by the engine's names. packed: of those of which a packed copy is all that may
        be left; the caller compares the copy.
        """
        faults = []
        for name, own in self._patches.items():
            for number, patch in enumerate(own):
                param = params[patch.param]
                if param.numel() == 0 and patch.param in packed:
                    continue
                key = (name, number)
                if key not in self._values:
                    faults.append(f"{name} did not arrive")
                elif param.numel() == 0:
                    faults.append(f"{name} can't be read back: {patch.param} has no elements")
                elif (held := _digest(patch.inside(param).to(self._dtypes[name]))) != self._values[key]:
                    faults.append(f"{name} {self._explain(key, held, before)}{self._cast(name, param)}")
        return faults

    def _cast(self, name: str, param: torch.Tensor) -> str:
        """In which dtype a buffer is held that was sent in another."""
        sent = self._dtypes[name]
        return "" if param.dtype == sent else f" (sent as {sent}, held as {param.dtype}, which may lack the value)"

    def _explain(self, key: Key, held: int, before: Resident | None) -> str:
        if before is not None and before._values.get(key) == held:
            return f"still has the values of version {before.version}"
        others = [name for (name, _), value in self._values.items() if value == held]
        if others:
            return f"has the values of {others[0]}"
        return f"has digest {held:016x}, the trainer's is {self._values[key]:016x}"


def _digest(block: torch.Tensor) -> int:
    return digest_bytes(kind_for(block.device), as_bytes(block.contiguous()))
