from typing import Any

from meshrl.config.base import Slice, field


class RewardTerm(Slice):
    kind: str = field(..., "a built-in reward such as math_answer, or a function as package.module:name")
    weight: float = field(1.0, "factor in the weighted sum; below 0 is a penalty")
    args: dict[str, Any] = field({}, "keyword arguments of the function")


class RewardConfig(Slice):
    terms: dict[str, RewardTerm] = field(
        {"answer": RewardTerm(kind="math_answer")}, "the terms by name; their weighted sum is the reward"
    )
    num_workers: int = field(1, "worker processes that grade completions; they load no model", ge=1)
    timeout_s: float = field(10.0, "seconds that one grading may take; then its worker is killed", gt=0)
    max_memory_bytes: int = field(2 << 30, "limit of the address space of one worker, in bytes", ge=64 << 20)
    max_failure_fraction: float = field(
        0.2, "share of a step's gradings that may fail; with a higher share the run ends", ge=0, le=1
    )
