"""Python imports this file at its start if its folder is in PYTHONPATH. torchvision's wheel is made for CUDA: on a CPU
build of torch its import fails until two of its operators are declared. They are never called here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class DeclaresOperators(MetaPathFinder):
    """Declares them when torchvision is imported, because the import of torch takes seconds."""

    library: Any = None  # its operators exist as long as this object

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, DeclaresOperators())
