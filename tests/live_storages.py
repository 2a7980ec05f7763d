"""The most bytes that exist at one time among the results of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """peak: in this block, of storages that were made in it. An operation's own intermediate memory is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, results = ([t for t in tree_leaves(of) if isinstance(t, torch.Tensor)] for of in ((args, kwargs), out))
        known = {t.untyped_storage()._cdata for t in given}
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        for storage in (t.untyped_storage() for t in results):
            if storage._cdata not in known:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out
