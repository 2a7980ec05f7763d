"""What the CPU of this machine computes fast, without torch: from the flags that Linux lists."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

# Device files of NVIDIA, AMD, Intel, Ascend and WSL's accelerators.
_ACCELERATORS = ("nvidia0", "nvidiactl", "kfd", "dri/renderD128", "accel/accel0", "davinci0", "dxg")


def products_of_16_bits_are_slow(flags: Collection[str] | None = None, accelerator: bool | None = None) -> bool:
    """Whether ranks use a CPU on which oneDNN has no fast products of 16-bit matrices: x86 without AVX-512, AMX or
    AVX-NE-CONVERT. There a linear layer, and most of all the gradient of its input, takes many times as
    long as in fp32.

    flags: of the CPU, as in /proc/cpuinfo. accelerator: whether ranks have one. None = those of this machine; False
    without x86 flags.
    """
    if accelerator is None:
        forced = os.environ.get("MESHRL_DEVICE")
        accelerator = forced != "cpu" if forced else bool(accelerator_files())
    if flags is None:
        flags = _flags()
    fast = {"avx512vl", "avx512bw", "avx512dq"} <= {*flags} or not {"amx_bf16", "avx_ne_convert"}.isdisjoint(flags)
    return "sse2" in flags and not fast and not accelerator


def accelerator_files() -> list[str]:
    """The device files of accelerators that this machine has; an integrated GPU has dri/renderD128, too."""
    return [name for name in _ACCELERATORS if Path("/dev", name).exists()]


def _flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:  # not Linux
        return frozenset()
    lists = (line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lists, ()))
