"""A rank on a CPU reuses freed memory: the next tensor of the same size needs no new pages from the system."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from meshrl.core.device import keep_freed_memory

of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such settings")
PAGE_FAULTS = """
import resource, sys, torch
from meshrl.core.device import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory(torch.device("cpu"))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(12 << 20)
before = faults()
for _ in range(10):
    torch.ones(12 << 20)
print(faults() - before)
"""


def page_faults(how):
    command = [sys.executable, "-c", PAGE_FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@of_glibc
@pytest.mark.slow
def test_a_tensor_of_48_mib_reuses_freed_pages():
    assert page_faults("plain") > 1000  # ten times 48 MiB, in pages of 4 KiB or more
    assert page_faults("keep") < 1000


def test_an_accelerator_has_an_allocator_of_its_own():
    assert not keep_freed_memory(torch.device("meta"))


RETURNED = """
import sys, psutil, torch
from meshrl.core.device import keep_freed_memory, return_freed_memory
cpu, process = torch.device("cpu"), psutil.Process()
assert keep_freed_memory(cpu)
parts = [torch.ones(1 << 18) for _ in range(int(sys.argv[1]))]
del parts[:-1]  # the last one is the end of the heap
before = process.memory_info().rss
return_freed_memory(cpu)
print(before - process.memory_info().rss)
"""


@of_glibc
@pytest.mark.slow
@pytest.mark.parametrize(("num_mib", "is_returned"), [(900, True), (200, False)])
def test_much_freed_memory_is_returned_to_the_system_and_little_is_kept(num_mib, is_returned):
    command = [sys.executable, "-c", RETURNED, str(num_mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    returned = int(done.stdout)
    assert returned > 0.9 * (num_mib << 20) if is_returned else returned < 1 << 24


PRIMITIVES = """
import ctypes, sys, torch
from meshrl.core.device import _Mallinfo, keep_few_primitives
if sys.argv[1] == "few":
    keep_few_primitives()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = _Mallinfo
weight = torch.ones(256, 256, dtype=torch.bfloat16)
for rows in range(100, 600):
    if rows == 200:
        before = libc.mallinfo2().uordblks
    torch.nn.functional.linear(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
print(libc.mallinfo2().uordblks - before)
"""


@of_glibc
@pytest.mark.slow
def test_products_of_many_sizes_leave_little_in_the_heap():
    own = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # a run in this process has set them
    environment = {name: value for name, value in os.environ.items() if name not in own}
    left = {}
    for kept in ("few", "many"):
        command = [sys.executable, "-c", PRIMITIVES, kept]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
        left[kept] = int(done.stdout)
    if left["many"] < 1 << 20:
        pytest.skip("this CPU computes products of bf16 without oneDNN")
    assert left["few"] < left["many"] / 10
