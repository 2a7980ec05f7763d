"""Stands in for torch_memory_saver, which exists for GPUs only: memory that was allocated in a region can be released
and allocated again under the same tensors. As on a GPU, its content is lost; here it becomes NaN."""

import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Record(TorchDispatchMode):
    """Adds the memory of the tensors that are made to `storages`, by address."""

    def __init__(self, storages):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                ref = StorageWeakRef(tensor.untyped_storage())
                self._storages[ref.cdata] = ref
        return result


class _Saver:
    enabled = True

    def __init__(self):
        self._storages = {}  # by tag
        self._released = {}  # [(storage, its bytes)] by tag

    def region(self, tag, enable_cpu_backup=False):
        return _Record(self._storages.setdefault(tag, {}))

    def pause(self, tag):
        refs = [ref.cdata for ref in self._storages[tag].values() if not ref.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref) for ref in refs]
        self._released[tag] = [(storage, storage.nbytes()) for storage in storages if storage.resizable()]
        for storage, _ in self._released[tag]:
            storage.resize_(0)

    def resume(self, tag):
        for storage, num_bytes in self._released.pop(tag):
            storage.resize_(num_bytes)
            storage.fill_(0xFF)  # NaN in every floating-point type


torch_memory_saver = _Saver()
configure_subprocess = contextlib.nullcontext
