"""A rank on a CPU reuses freed memory: the next tensor of the same size needs no new pages from the system."""

import platform
import subprocess
import sys

import pytest
import torch

from meshrl.core.device import keep_freed_memory

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no such options")
def test_a_tensor_of_48_mib_reuses_freed_pages():
    assert page_faults("plain") > 1000  # ten times 48 MiB, in pages of 4 KiB or more
    assert page_faults("keep") < 1000


def test_an_accelerator_has_an_allocator_of_its_own():
    assert not keep_freed_memory(torch.device("meta"))
