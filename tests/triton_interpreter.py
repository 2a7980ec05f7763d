"""Triton kernels on a CPU, in Triton's interpreter, for the tests of kernels in tests/unit. `make test-vllm` runs them:
vLLM's environment has Triton. It takes a gigabyte, so the ordinary one does not get it for these tests alone."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton, which `make test-vllm` has", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":  # it has to be set before Triton is imported
    pytest.skip("needs TRITON_INTERPRET=1, as in `make test-vllm`", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def bf16_as_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as the bits of its numbers in uint16. Its matrix product takes them for integers,
    and its cast from float32 truncates; on a device products are exact, and the cast rounds to the nearest."""
    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(bits.numpy(), tl.bfloat16)

    def multiplied(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(self, wide(left), wide(right), *rest)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiplied)
