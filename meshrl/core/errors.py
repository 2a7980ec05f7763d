"""Every error a user can meet. Each says what happened, the value got, what is allowed and what to do."""

from __future__ import annotations

from dataclasses import dataclass


class MeshrlError(Exception):
    """Base of all errors that meshrl raises on purpose."""


class ConfigError(MeshrlError):
    """A configuration that can't run: raised before torch is imported."""


class DataError(MeshrlError):
    """A row or file of data that doesn't fit; the message names file and line."""


class UnloadedParamsError(MeshrlError):
    """Trainer and sampler disagree on names, shapes or dtypes; raised before training starts."""


class SyncError(MeshrlError):
    """A weight transfer that did not arrive as it was sent; names the tensor or the stage."""


class StaleWeightsError(MeshrlError):
    """A sampler was asked to generate with a weight version it does not have."""


class SamplerMismatchError(MeshrlError):
    """What was sampled and what the trainer scores differ by more than the calibrated threshold."""


class CapabilityError(MeshrlError):
    """An engine was asked for something it does not declare in its Capabilities."""


class RequestError(MeshrlError):
    """A generate request that can't be served as asked (too long, bad sampling parameters)."""


class RankFailure(MeshrlError):
    """A rank worker died or raised; carries the rank, the phase and the cause."""

    def __init__(self, rank: int, phase: str, cause: str):
        super().__init__(f"rank {rank} failed in phase {phase!r}: {cause}")
        self.rank, self.phase, self.cause = rank, phase, cause


class RewardError(MeshrlError):
    """Too many graders failed, or a reward function returned something that is no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A typed failure that takes the place of a value: counted, masked, never a reward of 0.

    kind: timeout | crash | memory | bad_value | agent | engine. message: one line for people.
    """

    kind: str
    message: str
