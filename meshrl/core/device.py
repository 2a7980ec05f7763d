"""Everything that depends on the kind of accelerator: device type, backend, threads, memory and random generators. No
other file names a kind.

CPUs are tested, and CUDA on one H200 (docs/perf/gpu.md). NPU and XPU have the same torch.accelerator interface, and are
untested. AMD GPUs appear as "cuda" in PyTorch.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
import itertools
import json
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from meshrl.core.errors import ConfigError

T = TypeVar("T")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
_GLIBC_OPTIONS = {-4: 0, -1: 2**31 - 1, -2: 64 << 20}  # malloc.h: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
_NUM_PRIMITIVES = "64"  # a micro-batch of SmolLM2 needs 18 to 31
_MUCH_FREED = 512 << 20  # bytes; less is not worth the time to clear the pages again
_COUNTED_AS = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU"}
SETTINGS = ("CUDA_", "HIP_")  # environment variables of the libraries of devices begin with these
VISIBLE_DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"),
)


def device_type() -> str:
    """The accelerator of this machine, or "cpu" where torch.distributed has no backend for it or there is none.
    MESHRL_DEVICE overrides it (a test on a GPU machine may need the CPU)."""
    forced = os.environ.get("MESHRL_DEVICE")
    if forced:
        if forced not in _BACKENDS:
            raise ConfigError(f"MESHRL_DEVICE is {forced!r}; allowed: {', '.join(_BACKENDS)}. Unset it, or correct it")
        return forced
    accelerator = _accelerator()
    return accelerator if accelerator in _BACKENDS else "cpu"


def device_notice() -> str | None:
    """Why ranks on this machine use the CPU although it has an accelerator; None where they use it or there is none."""
    accelerator = _accelerator()
    if accelerator in _BACKENDS or os.environ.get("MESHRL_DEVICE"):
        return None
    usable = ", ".join(name for name in _BACKENDS if name != "cpu")
    return (
        f"the accelerator of this machine is {accelerator}, for which torch.distributed has no backend: ranks on this "
        f"machine use the CPU. Accelerators that ranks can use: {usable}."
    )


def _accelerator() -> str:
    """PyTorch's name of the accelerator of this machine; "cpu" without one."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return "cpu"


def device_count() -> int:
    """Number of devices of this process's device type; 0 for the CPU. On NVIDIA GPUs, PyTorch counts them by NVML,
    without opening one."""
    return 0 if device_type() == "cpu" else torch.accelerator.device_count()


def may_have_own_device() -> bool:
    """Whether the launcher of this process and others may have given it a device that the others don't see, as `srun
    --gpus-per-task` does."""
    return device_count() == 1 and any(name in os.environ for name in VISIBLE_DEVICES)


def local_device(local_rank: int) -> torch.device:
    """The device of a local rank; it becomes the current device. A process that sees one device uses it whatever its
    local rank is. (cluster/launch.py refuses ranks that would share a device.) Raises: ConfigError."""
    kind, count = device_type(), device_count()
    if kind == "cpu":
        return torch.device("cpu")
    if not count:
        raise ConfigError(f"MESHRL_DEVICE is {kind}, but this machine has no such device. Unset it, or set it to cpu")
    index = local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def has_own_memory(device: torch.device) -> bool:
    """Whether tensors on this device are outside of host memory."""
    return device.type != "cpu"


def device_name(device: torch.device) -> str:
    """The product name of an accelerator; cpu for the CPU."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def arithmetic(device: torch.device) -> str:
    """What the bits of a result depend on besides the inputs and the versions: processor and threads."""
    if device.type != "cpu":
        return f"{device_name(device)}, {build_text()}"
    threads = torch.get_num_threads()
    return f"{torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''} a rank"


def threads_of(text: str) -> int | None:
    """The threads of a rank with this `arithmetic`; None on an accelerator."""
    found = re.search(r"(\d+) threads? a rank$", text)
    return None if found is None else int(found[1])


def build_text() -> str:
    """What this build of PyTorch computes on besides CPUs, such as CUDA 13.0; "" = nothing."""
    if torch.version.hip is not None or torch.version.cuda is not None:
        return f"ROCm {torch.version.hip}" if torch.version.hip is not None else f"CUDA {torch.version.cuda}"
    return "" if _accelerator() == "cpu" else _accelerator()


def named_devices() -> list[tuple[str, int]]:
    """The product name and the bytes of memory of each device of this process; empty for the CPU."""
    devices = [torch.device(device_type(), index) for index in range(device_count())]
    return [(device_name(device), torch.accelerator.get_memory_info(device)[1]) for device in devices]


def peer_speeds() -> list[tuple[int, int, bool, float]]:
    """Of each pair of this process's devices: whether one can read the other's memory, and the bytes/s of a copy."""
    devices = [torch.device(device_type(), index) for index in range(device_count())]
    direct = getattr(torch.get_device_module(device_type()), "can_device_access_peer", lambda a, b: False)
    return [(a.index, b.index, direct(a, b), copy_speed(a, b)) for a, b in itertools.combinations(devices, 2)]


def copy_speed(source: torch.device, target: torch.device, num_bytes: int = 256 << 20) -> float:
    """Bytes/s of a copy between two devices; the second copy is timed."""
    sent = torch.ones(num_bytes, dtype=torch.uint8, device=source)
    received, seconds = torch.empty_like(sent, device=target), 0.0
    for _ in range(2):
        start = time.perf_counter()
        received.copy_(sent)
        for device in (source, target):
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - start
    return num_bytes / seconds


def visible_devices(device: torch.device, count: int) -> dict[str, str]:
    """The environment in which a child process sees this device and the count - 1 after it, and no others."""
    if device.type != "cuda":
        return {}
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = mine.split(",") if mine else [str(index) for index in range(torch.accelerator.device_count())]
    first = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def current_device(kind: str) -> torch.device:
    """The current device of this kind in this process."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def cluster_resources() -> tuple[str, ...]:
    """The resource names under which cluster schedulers count accelerators that this run may use; empty when
    MESHRL_DEVICE is cpu. Ranks may have accelerators although the controller has none."""
    kind = os.environ.get("MESHRL_DEVICE") or None
    return tuple(dict.fromkeys(name for device, name in _COUNTED_AS.items() if kind in (None, device)))


def dist_backend(device: torch.device) -> str:
    """The torch.distributed backend of a device; with accelerators, gloo is added for CPU tensors."""
    name = _BACKENDS[device.type]
    return name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"


def transfer_device(device: torch.device) -> torch.device:
    """The device of the tensors that a `separate_group` sends: the CPU, except where NCCL can be used by itself."""
    return device if device.type == "cuda" else torch.device("cpu")


def separate_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: datetime.timedelta) -> Any:
    """A process group besides the default one, for tensors on `device`, which is a `transfer_device`. Its
    `broadcast(tensor, root)` returns a dist.Work. Waits for all members. Raises: RuntimeError if one does not connect.
    """
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)  # else the first broadcast would wait for all to call it
    return group


def abort_group(group: Any) -> None:
    """End a `separate_group` for all its members; collectives that still wait in it fail."""
    if isinstance(group, dist.ProcessGroupGloo):
        return  # it ends with the last reference to it
    group.abort()


def seed_generators(seed: int, rank: int) -> None:
    """Seed this process's generators of torch (on all devices), numpy and Python's random: a stream for each (seed,
    rank). What has to be equal on all ranks must not be drawn from them."""
    words = np.random.SeedSequence([seed, rank]).generate_state(4)
    number = int.from_bytes(words.tobytes(), "little")
    torch.manual_seed(number % (1 << 63))
    np.random.seed(words)
    random.seed(number)


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's generators by kind of device: of the CPU, and of an accelerator."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_generator_state(kind: str, state: torch.Tensor) -> None:
    """kind: of the device, as in `generator_states`."""
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(kind).set_rng_state(state)


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """If wanted, torch chooses kernels whose results are the same to the bit in each call. By default some kernels of
    GPUs add the numbers in an order that changes, such as attention's backward.

    Raises: ConfigError for an operation that has no such kernel.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # some versions of torch require it
    memory: Any = torch.utils.deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).split(". ")[0]
        raise ConfigError(f"train.full_determinism is true, but {reason}. Set train.full_determinism=false") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states of this process's generators at the end of the block."""
    states = generator_states(current_device(device_type()))
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for kind, state in states.items():
            set_generator_state(kind, state)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def exports_memory(device: torch.device) -> bool:
    """Whether another process can open memory of this accelerator (`export_memory`)."""
    return device.type == "cuda"


def export_memory(memory: torch.Tensor) -> str:
    """A handle, as text, with which another process opens this memory of an accelerator, as long as it exists."""
    _, *parts = memory.untyped_storage()._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts])


@lru_cache(maxsize=2)  # a memory that is opened again in each sync would be counted as closed by its owner
def import_memory(handle: str, device: torch.device) -> torch.Tensor:
    """uint8[N]: the memory of a handle of `export_memory`, which is on this device."""
    names = ("handle", "num_bytes", "offset", "counter", "counter_offset", "event", "is_event_used")
    parts = dict(zip(names, json.loads(handle), strict=True))
    for name in ("handle", "counter", "event"):
        parts[name] = bytes.fromhex(parts[name])
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts.values())
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work, so that a timed span ends with the work. Nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def queues(device: torch.device) -> Iterator[Sequence[AbstractContextManager[object]]]:
    """Two contexts. The work that is queued in one is done in its order, at the same time as that of the other, after
    what was queued before this block and before what is queued after it. On the CPU they have no effect."""
    if device.type == "cpu":
        yield [nullcontext()] * 2
        return
    current, both = torch.accelerator.current_stream(device), _streams(device)
    for stream in both:
        stream.wait_stream(current)
    try:
        yield both
    finally:
        for stream in both:
            current.wait_stream(stream)


@lru_cache  # the allocator reuses memory only within a stream
def _streams(device: torch.device) -> list[torch.Stream]:
    return [torch.Stream(device) for _ in range(2)]


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the CPU on the device, by one copy for which the host does not wait. On the CPU they are returned."""
    if device.type == "cpu":
        return list(tensors)
    starts = list(itertools.accumulate((-(-x.nbytes // 8) * 8 for x in tensors), initial=0))  # aligned for any dtype
    joined = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    sent = torch.empty_like(joined, device=device)
    parts = [
        [memory[start : start + x.nbytes].view(x.dtype).view(x.shape) for x, start in zip(tensors, starts)]
        for memory in (joined, sent)
    ]
    for x, part in zip(tensors, parts[0]):
        part.copy_(x)
    sent.copy_(joined, non_blocking=True)
    return parts[1]


def fetched(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a tensor to the host; returns a function that waits for the copy, and for nothing that is queued
    after it."""
    if tensor.device.type == "cpu" or not torch.accelerator.is_available():
        return lambda: tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.Event(tensor.device)
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return copy

    return wait


def graph_memory() -> Any:
    """Memory for graphs of `recorded` that never run at the same time."""
    return torch.cuda.graph_pool_handle()


def recorded(work: Callable[[], T], memory: Any) -> tuple[Callable[[], None], T]:
    """Record the launches of `work`, which has run before, as one graph, on a device for which `has_triton` holds;
    returns a function that repeats them, and the result, whose memory each repetition fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def memory_stats(device: torch.device) -> dict[str, int]:
    """Bytes allocated now and at peak on an accelerator; empty on the CPU, where the process's RSS shows memory."""
    if device.type == "cpu":
        return {}
    return {
        "allocated_bytes": torch.accelerator.memory_allocated(),
        "peak_bytes": torch.accelerator.max_memory_allocated(),
    }


def free_bytes(device: torch.device) -> int | None:
    """Bytes of an accelerator that this process can allocate, with its allocator's unused ones; None on the CPU."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return None
    unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return torch.accelerator.get_memory_info(device)[0] + unused


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak-memory window on an accelerator; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def empty_cache(device: torch.device) -> None:
    """Release the allocator's cached blocks to the device; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def has_varlen_kernels(device: torch.device) -> bool:
    """Whether torch.nn.attention.varlen has kernels for this device: NVIDIA GPUs from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_long_row_kernels(device: torch.device) -> bool:
    """Whether cuDNN's attention has kernels made for this device: NVIDIA GPUs of the generations of H100 and B200."""
    return has_varlen_kernels(device) and torch.cuda.get_device_capability(device)[0] in (9, 10)


@lru_cache
def has_triton(device: torch.device) -> bool:
    """Whether our Triton kernels are used for tensors on this device: on NVIDIA GPUs from Ampere on, where Triton is
    installed (PyTorch for CUDA requires it). MESHRL_TRITON=0 keeps torch's functions."""
    if not has_varlen_kernels(device) or os.environ.get("MESHRL_TRITON") == "0":
        return False
    return importlib.util.find_spec("triton") is not None


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def set_threads(num_ranks_on_machine: int, threads: int | None = None) -> int:
    """Share the machine's cores evenly among its ranks and return the number of threads of this rank: at least 1, and
    at most OMP_NUM_THREADS, with which a user may leave cores to other processes. threads: use this number instead."""
    cores = num_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if threads is None:
        threads = max(1, min(cores // max(1, num_ranks_on_machine), int(asked) if asked.isdigit() else cores))
    torch.set_num_threads(threads)
    return threads


def keep_few_primitives() -> None:
    """Make PyTorch keep few of the primitives that oneDNN compiles on a CPU for each size of a 16-bit product; call it
    before the first one. Micro-batches differ in size, so theirs are hardly used again, but by default it keeps 1,024
    in each of two caches, all over the heap, where they separate memory that is freed. A user's own values stay.
    Processes that this one starts inherit the setting.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _NUM_PRIMITIVES)


def _glibc(device: torch.device) -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if device.type == "cpu" and platform.libc_ver()[0] == "glibc" else None


def keep_freed_memory(device: torch.device) -> bool:
    """Make a process on a CPU reuse freed memory for its next tensors; returns whether the allocator supports that.

    By default glibc returns large blocks to the system at once, and the system has to clear each page again. Call it
    when the model is loaded.
    """
    if (libc := _glibc(device)) is None:
        return False
    return all(libc.mallopt(option, value) == 1 for option, value in _GLIBC_OPTIONS.items())


def return_freed_memory(device: torch.device) -> None:
    """Return to the system what `keep_freed_memory` keeps, if it is much: between two phases of different sizes, the
    holes that one leaves do not suit the tensors of the other, and the process would grow to the sum of both."""
    if (libc := _glibc(device)) is not None and hasattr(libc, "mallinfo2"):  # from glibc 2.33 on
        libc.mallinfo2.restype = _Mallinfo
        if libc.mallinfo2().fordblks > _MUCH_FREED:
            libc.malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2; uordblks, fordblks: bytes of the heap in use, and free."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcdefg", "uordblks", "fordblks", "keepcost")]
