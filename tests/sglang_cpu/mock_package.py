"""Packages without content, in the place of packages that don't load, or are large, on a machine without a GPU.

A submodule can be imported under any name. An attribute is a class if its name begins with a capital letter, else a
submodule. As triton, a function can become a kernel, which can't be called.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything:
    BICUBIC, BILINEAR, NEAREST, NEAREST_EXACT, BOX, HAMMING, LANCZOS = range(7)  # of torchvision's InterpolationMode

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass


class _Kernel:
    """A function with @triton.jit, whose attributes other code may read."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid):
        raise NotImplementedError(f"{self.__name__} can't run: its package is a stand-in")

    __call__ = __getitem__


class MockPackage(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full) or (type(name, (_Anything,), {}) if name[:1].isupper() else _new(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0] if isinstance(args[0], _Kernel | type) else _Kernel(args[0])
        return lambda function: function if isinstance(function, _Kernel | type) else _Kernel(function)

    def __getitem__(self, key):
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package):
        self._beginning = f"{package}."

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self._beginning) else None

    def create_module(self, spec):
        return sys.modules.get(spec.name) or _new(spec.name)

    def exec_module(self, module):
        pass


def _new(name):
    module = sys.modules[name] = MockPackage(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, _Finder(name), is_package=True)
    return module


def become_mock(name, version):
    """Turn the module with this name into such a package."""
    module = sys.modules[name]
    module.__class__, module.__path__, module.__version__ = MockPackage, [], version
    sys.meta_path.insert(0, _Finder(name))
