"""Meta tensors in the place of an accelerator's: shapes and dtypes without data. Code takes the path of an accelerator,
since their device is not the CPU; what would cost time on the device is counted."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
_ITEM = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_OF_VALUES = (torch.ops.aten.nonzero.default, torch.ops.aten.index.Tensor)  # the latter with an index of bools
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_WITHOUT_VALUES = (  # of new memory, or of the memory of the input
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten._unsafe_view.default,
)


class DeviceCalls(TorchDispatchMode):
    """Records the operators that are called, and counts three kinds of them.

    calls: (name of the operator, dtypes of its tensors, dtype of its result or None).
    num_reads: the host waits for the device: a number of it (item, tolist, bool), a copy to the host, which yields
    zeros, or a result whose shape depends on values (nonzero, a boolean index), for which all elements are nonzero.
    Other operators of the last kind raise NotImplementedError.
    num_uploads: tensors of the host as inputs of an operator on the device, a copy or an index.
    num_launches: other operators that compute on the device: no views, and no memory without values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[torch.dtype, ...], torch.dtype | None]] = []
        self.num_reads = self.num_uploads = self.num_launches = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Reads, uploads and launches."""
        return self.num_reads, self.num_uploads, self.num_launches

    def named(self, part: str) -> list[tuple[str, tuple[torch.dtype, ...], torch.dtype | None]]:
        """The calls of operators whose name contains this text."""
        return [call for call in self.calls if part in call[0]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if tensors and tensors[0].device == META:
            if func in _ITEM:
                self.num_reads += 1
                return torch.zeros((), dtype=tensors[0].dtype).item()
            if any(isinstance(x, torch.device) and x.type == "cpu" for x in (*args, *kwargs.values())):
                self.num_reads += 1
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if _is_composite(func):  # in inference mode, operators arrive before they are decomposed
            with self:
                return func.decompose(*args, **kwargs)
        with _config.patch(meta_nonzero_assume_all_nonzero=True) if func in _OF_VALUES else nullcontext():
            result = func(*args, **kwargs)
        dtype = result.dtype if isinstance(result, torch.Tensor) else None
        self.calls.append((str(func), tuple(x.dtype for x in tensors), dtype))
        self._count(func, _tensors((*args, *kwargs.values())), _tensors(result))
        return result

    def _count(self, func: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        if not any(x.device == META for x in (*inputs, *results)):
            return
        if func in _OF_VALUES:
            self.num_reads += len(inputs) == 1 or any(x.dtype == torch.bool for x in inputs[1:])
        if func.is_view or func in _WITHOUT_VALUES:
            return
        num_of_host = sum(x.device.type == "cpu" and x.dim() > 0 for x in inputs)
        self.num_uploads += num_of_host
        self.num_launches += not (num_of_host and func in _COPIES)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those of an operator's arguments or results, of which some are lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in _tensors(value)] if isinstance(values, (tuple, list)) else []
