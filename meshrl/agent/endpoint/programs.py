"""The program of an endpoint agent: an async function, which runs in the controller's event loop, a function that
blocks, which runs in a thread of a worker process, or a command.

Worker processes remain for the run, because imports of SDKs take seconds. A command and a worker are killed with all
processes that they have started.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from meshrl.config.reward import MAX_REWARD
from meshrl.process.diagnosis import exit_text, output_tail
from meshrl.process.guard import GuardedProcess
from meshrl.reward.replies import error_line

THREADS = 16  # attempts at once in one worker process
_POLL_S = 0.05
_TAIL_BYTES = 1000
_MAX_LINE_BYTES = 1 << 20


class ProgramFailed(Exception):
    """An attempt that failed. kind: of its Failure."""

    def __init__(self, message: str, kind: str = "crash"):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a program gets, as keywords of its signature, or in the environment of a command.

    url: of the endpoint, for Anthropic's SDK; base_url: with /v1, for OpenAI's. api_key: valid for this attempt.
    messages, answer: of the row. prompt: id, env, meta of the row.
    """

    url: str
    base_url: str
    api_key: str
    model: str
    messages: list[dict[str, Any]]
    answer: Any
    prompt: dict[str, Any]


Outcome = tuple[float | None, dict[str, float]]
"""The reward of an attempt, None = none, and its metrics."""


class AgentProgram(Protocol):
    async def __call__(self, call: Call) -> Outcome:
        """Run one attempt. Raises: ProgramFailed, or an exception of the user's code."""
        ...

    async def close(self) -> None:
        return None


def keywords(function: Callable[..., Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the signature has."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in call.items() if takes_all or name in parameters}


def unknown_parameters(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default that no program gets."""
    parameters, given = inspect.signature(function).parameters.values(), {field.name for field in fields(Call)}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [name for name in needed if name not in given]


def reward_of(value: Any, place: str) -> float | None:
    """Raises: ProgramFailed for a result that is no reward."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (is_number and abs(value) <= MAX_REWARD):  # not a NaN
        return value
    raise ProgramFailed(
        f"{place} returned {value!r:.80}; it must return a number of at most {MAX_REWARD:g} in size, or None"
    )


def outcome_of(value: Any, place: str) -> Outcome:
    """Of a reward, or of {"reward": reward, "metrics": {name: number}}. Raises: ProgramFailed for another result."""
    if not isinstance(value, dict) or value.keys() - {"reward", "metrics"}:
        return reward_of(value, place), {}
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise ProgramFailed(f"{place} returned the metrics {metrics!r:.80}; they must be numbers by name")
    numbers = {str(name): reward_of(number, f"{place}, metric {name!r:.40},") for name, number in metrics.items()}
    return reward_of(value.get("reward"), place), {name: n for name, n in numbers.items() if n is not None}


class AsyncProgram(AgentProgram):
    """An async function."""

    def __init__(self, function: Callable[..., Awaitable[Any]], name: str):
        self._function, self._name = function, name

    async def __call__(self, call: Call) -> Outcome:
        try:
            value = await self._function(**keywords(self._function, asdict(call)))
        except SystemExit as error:  # it would end the event loop
            raise ProgramFailed(error_line(error)) from error
        return outcome_of(value, self._name)


class CommandProgram(AgentProgram):
    """A command, with this environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, and
    MESHRL_TASK, a JSON file with messages and prompt. It may write {"reward": number, "metrics": {name: number}} into
    the file MESHRL_RESULT; metrics may be missing."""

    def __init__(self, command: Sequence[str]):
        self._command = list(command)

    async def __call__(self, call: Call) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="meshrl-agent-") as folder:
            task, result = Path(folder, "task.json"), Path(folder, "result.json")
            task.write_text(json.dumps({"messages": call.messages, "prompt": call.prompt, "model": call.model}))
            environment = {
                "OPENAI_BASE_URL": call.base_url,
                "OPENAI_API_KEY": call.api_key,
                "ANTHROPIC_BASE_URL": call.url,
                "ANTHROPIC_API_KEY": call.api_key,
                "MESHRL_TASK": str(task),
                "MESHRL_RESULT": str(result),
            }
            with open(Path(folder, "output"), "w+b") as output:
                process = GuardedProcess(
                    "meshrl.process.guard", ["", *self._command], output=output, environment=environment
                )
                try:
                    while (code := process.exit_code()) is None:
                        await asyncio.sleep(_POLL_S)
                finally:
                    await asyncio.shield(asyncio.to_thread(process.kill))
                if code:
                    printed = output_tail(output, _TAIL_BYTES) or "nothing"
                    raise ProgramFailed(f"the command ended with {exit_text(code)}; it printed: {printed}")
            return outcome_of(_written(result), "the command") if os.path.lexists(result) else (None, {})


def _written(file: Path) -> Any:
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        written = json.loads(file.read_bytes())
        return {"reward": written["reward"], "metrics": written.get("metrics")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise ProgramFailed(f'the command wrote a result that is not {{"reward": number}}: {cause}') from cause


class _FunctionWorker:
    """A process that runs a function in threads. A worker with an attempt that was given up takes no other one, and is
    killed when its attempts have ended."""

    def __init__(self, function: str):
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self.process = GuardedProcess(
                "meshrl.agent.endpoint.worker",
                [str(theirs.fileno()), function],
                output=self._output,
                environment={"PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )
        self._link = ours
        self._connected = asyncio.create_task(asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES))
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.num_running, self.is_retired, self._number = 0, False, 0

    async def call(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.num_running += 1
        self._number = number = self._number + 1
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            _, writer = await self._connected
            writer.write(json.dumps({"number": number, "fields": fields}).encode() + b"\n")
            return await answered
        finally:
            self.is_retired |= not answered.done() or answered.cancelled()
            self.num_running -= 1
            del self._waiting[number]
            if self.is_retired and not self.num_running:
                await asyncio.shield(self.end())

    async def _read(self) -> None:
        reader, _ = await self._connected
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                if (waiting := self._waiting.get(answer["number"])) is not None and not waiting.done():
                    waiting.set_result(answer)
            code = await asyncio.to_thread(self.process.exit_code, 2.0)
            ending = "closed its connection" if code is None else f"ended with {exit_text(code)}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            ending = f"sent an answer that is not valid ({type(error).__name__})"
        self.is_retired = True
        printed = output_tail(self._output, _TAIL_BYTES) or "nothing"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": f"its worker process {ending}; it printed: {printed}"})

    async def end(self) -> None:
        self.is_retired = True
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.to_thread(self.process.kill)
        self._connected.cancel()
        self._link.close()
        self._output.close()


class WorkerProgram(AgentProgram):
    """A function that blocks. function: package.module:name. There are as many workers as attempts need, with at most
    THREADS attempts each."""

    def __init__(self, function: str):
        self._function = function
        self._workers: list[_FunctionWorker] = []

    async def __call__(self, call: Call) -> Outcome:
        self._workers = [each for each in self._workers if not (each.is_retired and not each.num_running)]
        free = (each for each in self._workers if not each.is_retired and each.num_running < THREADS)
        worker = next(free, None)
        if worker is None:
            worker = _FunctionWorker(self._function)
            self._workers.append(worker)
        answer = await worker.call(asdict(call))
        if "error" in answer:
            raise ProgramFailed(answer["error"])
        return outcome_of(answer.get("reward"), self._function)

    async def close(self) -> None:
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._workers = []
