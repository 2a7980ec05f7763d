from typing import Any

from meshrl.config.base import Slice, field


class RewardTerm(Slice):
    kind: str = field(..., "a known reward such as math_answer, or a function as package.module:name")
    weight: float = field(1.0, "factor in the weighted sum; below 0 is a penalty")
    args: dict[str, Any] = field({}, "keyword arguments of the function")


class RewardConfig(Slice):
    terms: dict[str, RewardTerm] = field(
        {"answer": RewardTerm(kind="math_answer")}, "the terms by name; their weighted sum is the reward"
    )
    num_workers: int = field(1, "processes that grade; they can be killed and hold no model", ge=1)
    timeout_s: float = field(10.0, "seconds one grading may take before its worker is killed", gt=0)
    max_memory_bytes: int = field(2 << 30, "address space of one worker, in bytes", ge=64 << 20)
    max_failure_fraction: float = field(0.2, "share of a step's gradings that may fail before the run ends", ge=0, le=1)
