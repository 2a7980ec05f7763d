"""An agent may start something before the run's ranks, and end it after them, also when the run fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tiny_run import write_run

import meshrl
from meshrl.agent.loop import AgentContext, RunOfAgent, SingleTurn
from meshrl.agent.resolve import as_agent, opened
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.types import Generate, Prompt, Trajectory

ONE_STEP = ["cluster.executor=inline", "loop.num_steps=1", "loop.prompts_per_step=1", "loop.samples_per_prompt=2"]


class WithServer(SingleTurn):
    """Asks a server of its own before each answer."""

    def __init__(self, fails: bool):
        super().__init__()
        self.fails, self.num_asked = fails, 0
        self.server: asyncio.Server | None = None

    @asynccontextmanager
    async def opened(self, run: RunOfAgent) -> AsyncIterator[None]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_asked += 1
            writer.close()

        self.server = await asyncio.start_server(answer, "127.0.0.1", 0)
        run.note(f"the agent's server started in {run.folder.name}")
        try:
            yield
        finally:
            self.server.close()
            await self.server.wait_closed()
            run.note("the agent's server ended")

    async def run(self, prompt: Prompt, index: int, generate: Generate, ctx: AgentContext) -> Trajectory:
        assert self.server is not None
        reader, writer = await asyncio.open_connection(*self.server.sockets[0].getsockname())
        assert await reader.read() == b""
        writer.close()
        if self.fails:
            raise DataError("the agent can't answer")
        return await super().run(prompt, index, generate, ctx)


@pytest.mark.parametrize("fails", [False, True])
def test_the_server_of_an_agent_lives_as_long_as_the_ranks(fails: bool, tmp_path: Path):
    agent, config = WithServer(fails), write_run(tmp_path)
    try:
        meshrl.train(config, [*ONE_STEP, "run.name=served"], agent=agent, quiet=True)
    except DataError:
        assert fails
    assert agent.num_asked == 2 and agent.server is not None and not agent.server.is_serving()
    folder = tmp_path / "runs" / "served"
    assert json.loads((folder / "result.json").read_text())["status"] == ("failed" if fails else "done")
    notes = [line.partition("  ")[2] for line in (folder / "run_notes.txt").read_text().splitlines()]
    started, ended = notes.index("the agent's server started in served"), notes.index("the agent's server ended")
    (ready,) = [i for i, note in enumerate(notes) if note.startswith("ready after")]
    assert started < ready < ended


def test_an_agent_needs_no_lifetime_and_a_wrong_one_is_refused():
    class NoParameter(SingleTurn):
        def opened(self) -> None: ...

    class NoContext(SingleTurn):
        def opened(self, run: RunOfAgent) -> None: ...

    async def enter(agent: SingleTurn) -> None:
        async with opened(agent, RunOfAgent(folder=Path("runs/one"), note=print), "mine"):
            pass

    asyncio.run(enter(SingleTurn()))
    with pytest.raises(ConfigError, match=r"agent\.opened is .* meshrl calls it as agent\.opened\(run\)"):
        as_agent(NoParameter(), "agent")
    with pytest.raises(ConfigError, match="agent mine: its method `opened` returned NoneType"):
        asyncio.run(enter(NoContext()))
