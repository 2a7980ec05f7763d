"""The errors that meshrl raises for users, except TurnError (agent/flatten.py). Each states what is wrong, the value,
what is allowed and what to do."""

from __future__ import annotations

from dataclasses import dataclass


class MeshrlError(Exception):
    """Base class of all errors that meshrl raises on purpose."""


class ConfigError(MeshrlError):
    """A configuration or model that can't be used; raised before the first step, mostly before torch is imported."""


class DataError(MeshrlError):
    """A row or file of data that can't be used; the message names file and line."""


class UnloadedParamsError(MeshrlError):
    """A model's parameters and the tensors that should fill them, of its files or of a sync, differ in names, shapes,
    dtypes or ties; raised before any value is read or sent, with all differences."""


class SyncError(MeshrlError):
    """A weight transfer that failed, or whose received bytes differ from those sent; names the tensor or the stage."""


class SyncInterrupted(SyncError):
    """A rank's part in a sync ended because another rank failed, disconnected or was lost; the other rank's error has
    the cause."""


class StaleWeightsError(MeshrlError):
    """A sampler was asked to generate with a weight version it does not have."""


class SamplerMismatchError(MeshrlError):
    """The logprobs of sampler and trainer differ by more than the calibrated threshold."""


class CapabilityError(MeshrlError):
    """An engine was asked for something it does not declare in its Capabilities."""


class RequestError(MeshrlError):
    """A generate request that can't be served as asked (too long, bad sampling parameters)."""


class EngineFailure(MeshrlError):
    """The server of a rollout engine did not start, died, or did not answer; ends with the last lines of its output."""


class EngineEnded(EngineFailure):
    """The server's process has ended. A rank that only samples ends with it, and is replaced like any lost rank."""


class RankFailure(MeshrlError):
    """A rank worker died, raised or gave no answer. phase: what it was doing, a name of `cluster.deadlines`. cause: one
    line. details: what follows that line, as a traceback. stacks: the stacks of all ranks, which are not in the text.
    kind: raised | ended | silent; after the last two, a retry may succeed."""

    def __init__(self, rank: int, phase: str, cause: str, details: str = "", stacks: str = "", kind: str = "ended"):
        super().__init__(rank, phase, cause, details, stacks, kind)
        self.rank, self.phase, self.cause, self.details = rank, phase, cause, details
        self.stacks, self.kind = stacks, kind

    def __str__(self) -> str:
        first = f"rank {self.rank} failed in phase {self.phase!r}: {self.cause}"
        return f"{first}\n{self.details.rstrip()}" if self.details else first


class DeadlineError(MeshrlError):
    """A phase missed its deadline, and no rank is the cause: an agent or a grader."""


class CheckpointError(MeshrlError):
    """A checkpoint that can't be written, that is incomplete, or that is of another run; names the file."""


class OutputError(MeshrlError):
    """A file with a run's data or a command's result that can't be written; names the file and the reason."""


class AgentError(MeshrlError):
    """An agent raised an exception in too many attempts."""


class RewardError(MeshrlError):
    """Too many gradings failed, a reward worker could not be started, or a judge gave no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A typed failure in place of a value: counted, masked, never a reward of 0.

    kind: timeout | crash | memory | bad_value | judge | agent | engine. message: one line for people.
    """

    kind: str
    message: str


Graded = float | Failure | None
"""The result of one grading. None = abstained: the term does not apply to the row."""
