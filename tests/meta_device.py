"""Meta tensors in the place of an accelerator's: shapes and dtypes without data. Code takes the path of an accelerator,
since their device is not the CPU, and each time it would wait to read a number from the device is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class DeviceCalls(TorchDispatchMode):
    """Records the operators that are called and counts the copies to the host, which yield zeros.

    calls: (name of the operator, dtypes of its tensors, dtype of its result or None).
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...], torch.dtype | None]] = []
        self.num_reads = 0

    def named(self, part: str) -> list[tuple[str, tuple[torch.dtype, ...], torch.dtype | None]]:
        """The calls of operators whose name contains this text."""
        return [call for call in self.calls if part in call[0]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors and tensors[0].device == META:
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
                self.num_reads += 1
                return torch.zeros((), dtype=tensors[0].dtype).item()
            if any(isinstance(x, torch.device) and x.type == "cpu" for x in (*args, *kwargs.values())):
                self.num_reads += 1
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        result = func(*args, **kwargs)
        dtype = result.dtype if isinstance(result, torch.Tensor) else None
        self.calls.append((str(func), tuple(x.dtype for x in tensors), dtype))
        return result
