"""Move tensors of a device to host memory and back, in place: tensors and their views stay the same objects. Tensors
that are always in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from meshrl.parallel.fsdp import local_shard


def zeros_of(
    p: torch.Tensor, on_host: bool, dtype: torch.dtype | None = None, columns: int | None = None
) -> torch.Tensor:
    """Zeros of the shape, dtype and sharding of a parameter, on its device, or in host memory, page-locked if the
    parameter is not. columns: another size of the last dim, along which it is not sharded."""
    local = local_shard(p.detach())
    shape, full = (x.shape if columns is None else torch.Size([*x.shape[:-1], columns]) for x in (local, p))
    kind: dict[str, Any] = {"dtype": dtype or p.dtype, "device": "cpu" if on_host else local.device}
    zeros = torch.zeros(shape, pin_memory=on_host and local.device.type != "cpu", **kind)
    if not isinstance(p, DTensor):
        return zeros
    meta = TensorMeta(full, torch.empty(full, device="meta").stride(), kind["dtype"])
    # DTensor.from_local would move the shard to the mesh's device.
    return DTensor(zeros, DTensorSpec(p.device_mesh, p.placements, tensor_meta=meta), requires_grad=False)


class HostMemory:
    """The storages that are on the host instead of on this device. Its buffers stay allocated, for the next time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: dict[int, torch.Tensor] = {}  # by storage: uint8[bytes], page-locked for an accelerator
        self._moved: dict[int, torch.UntypedStorage] = {}

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of these tensors' local shards to the host, and free them."""
        storages = {s._cdata: s for s in (local_shard(t.detach()).untyped_storage() for t in tensors)}
        fresh = {key: s for key, s in storages.items() if s.nbytes() and s.device.type == self.device.type}
        for key, storage in fresh.items():
            if key not in self._buffers or self._buffers[key].numel() != storage.nbytes():
                pinned = self.device.type != "cpu"
                self._buffers[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._buffers[key].copy_(_bytes_of(storage))
        for storage in fresh.values():
            storage.resize_(0)
        self._moved |= fresh

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of these tensors back, those that were released."""
        if not self._moved:
            return
        for tensor in tensors:
            key = local_shard(tensor.detach()).untyped_storage()._cdata
            if (storage := self._moved.get(key)) is not None:
                storage.resize_(self._buffers[key].numel())  # if there is no room, a later call tries again
                _bytes_of(storage).copy_(self._buffers[key])
                del self._moved[key]

    def readable(self, local: torch.Tensor) -> torch.Tensor:
        """This tensor, or the same values on the host if its storage is released."""
        key = local.untyped_storage()._cdata
        if key not in self._moved:
            return local
        buffer = self._buffers[key].view(local.dtype)
        return buffer.as_strided(local.shape, local.stride(), local.storage_offset())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
