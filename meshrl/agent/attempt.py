"""One attempt of an agent, whose code may be a user's: its exception fails the attempt, and too many end the run."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import replace

from meshrl.agent.endpoint.programs import ProgramFailed
from meshrl.agent.flatten import check_turns
from meshrl.agent.loop import Agent, AgentContext, start_trajectory
from meshrl.agent.tools import is_being_cancelled
from meshrl.core.errors import AgentError, Failure, MeshrlError, RequestError
from meshrl.core.types import Generate, Prompt, Request, Trajectory, Turn
from meshrl.reward.replies import error_line

AGENT_FAILURES = ("crash", "timeout")
"""Kinds of failures of the agent's own code, which agent.max_failure_fraction bounds."""
_SHOWN = 3


async def attempt(
    agent: Agent, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext, name: str
) -> Trajectory:
    """The agent's trajectory, with valid turns; a failed one without turns when the agent raised an exception. The
    agent gets a copy of the prompt: what it changes, no other attempt sees. name: of the agent, for errors.
    """
    of_engine: list[BaseException] = []
    fields = {name: getattr(prompt, name) for name in ("messages", "answer", "meta")}
    own = replace(prompt, **copy.deepcopy(fields))

    async def observed(request: Request) -> Turn:
        asked_at = time.perf_counter()
        try:
            turn = await generate(request)
            turn.times.total_s = time.perf_counter() - asked_at
            return turn
        except RequestError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not is_being_cancelled(error):  # an agent may limit the time of a request
                of_engine.append(error)
            raise

    failure = None
    try:
        trajectory = await agent.run(own, index, observed, ctx)
    except RequestError as refusal:
        failure = Failure(kind="engine", message=str(refusal))
    except ProgramFailed as error:
        failure = Failure(kind=error.kind, message=str(error))
    except MeshrlError:
        if not of_engine:
            raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code: it may raise anything
        if is_being_cancelled(error):
            raise
        failure = Failure(kind="crash", message=error_line(error))
    if of_engine:
        raise of_engine[0]
    if failure is not None:
        trajectory = start_trajectory(prompt, index, ctx)
        trajectory.status, trajectory.failure = "failed", failure
    if not isinstance(trajectory, Trajectory):
        raise MeshrlError(f"agent {name} returned {trajectory!r:.80}; it must return a Trajectory")
    expected = start_trajectory(prompt, index, ctx)
    if (trajectory.id, trajectory.purpose) != (expected.id, expected.purpose):
        raise MeshrlError(
            f"agent {name} returned the trajectory {trajectory.id!r} with purpose {trajectory.purpose!r} as attempt "
            f"{expected.id!r} with purpose {expected.purpose!r}; return the one that "
            "meshrl.agent.loop:start_trajectory makes of the prompt, index and ctx of this call"
        )
    check_turns(trajectory)
    if trajectory.prompt is own and {name: getattr(own, name) for name in fields} == fields:
        trajectory.prompt = prompt  # all attempts at it share one object, which is logged once
    return trajectory


def check_attempts(trajectories: Sequence[Trajectory], name: str, max_fraction: float) -> None:
    """Raises: AgentError when the agent raised an exception in more than this share of the attempts."""
    crashes = _crashes(trajectories)
    if len(crashes) <= max_fraction * len(trajectories):
        return
    raise AgentError(
        f"agent {name} failed in {len(crashes)} of {len(trajectories)} attempts, more than "
        f"agent.max_failure_fraction = {max_fraction:g} allows. Examples:\n{_examples(crashes)}\n"
        "Fix the agent; of an exception, the last file and line are named."
    )


def crash_note(trajectories: Sequence[Trajectory], name: str) -> str | None:
    """A note about the attempts in which the agent raised an exception; None if there are none."""
    crashes = _crashes(trajectories)
    if not crashes:
        return None
    return (
        f"agent {name} failed in {len(crashes)} of {len(trajectories)} attempts, which are not trained "
        f"(rollout/crashed_fraction counts those of later steps):\n{_examples(crashes)}"
    )


def _crashes(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, Failure]]:
    return [(t, t.failure) for t in trajectories if t.failure is not None and t.failure.kind in AGENT_FAILURES]


def _examples(crashes: Sequence[tuple[Trajectory, Failure]]) -> str:
    return "\n".join(f"  row {t.prompt.id}, answer {t.index}: {f.message}" for t, f in crashes[:_SHOWN])
