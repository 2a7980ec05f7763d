"""torch.compile by block: one compilation for all blocks of a kind, and for packs of any length."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

import torch

from meshrl.core.errors import ConfigError
from meshrl.model import attention
from meshrl.model.causal import CausalModel


def compile_blocks(model: CausalModel, device: torch.device, by_module: bool) -> None:
    """Call it before the blocks are cut, checkpointed and sharded, so that none of this is traced. by_module: compile
    the modules of a block each by itself, since the ranks of tp exchange tokens between them.
    """
    problem = no_compiler(device)
    if model.routing is not None or model.has_states:
        part = "routers of experts" if model.routing is not None else "layers with a state"
        problem = f"{type(model.lm).__name__} has {part}, which would be compiled again for each pack"
    if problem:
        raise ConfigError(f"train.torch_compile is true, but {problem}. Set train.torch_compile=false")
    attention.register(outside_graphs=True)
    for block in model.blocks:
        for module in block.children() if by_module else [block]:
            module.forward = torch.compile(module.forward, dynamic=True)


def no_compiler(device: torch.device) -> str:
    """Why torch.compile can't run on this device; "" if it can."""
    if device.type != "cpu":
        return "" if importlib.util.find_spec("triton") else "Triton, its compiler for accelerators, is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports the compiler, which no other run needs
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++, or the one that CXX names)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"Python's headers, which its C++ code includes, are not installed: no {header}"
