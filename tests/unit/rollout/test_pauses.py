"""A pause of a server engine lasts until `resume`, even if a sync ends in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from sglang_servers import endpoint_client, sglang_client
from tiny_engines import ask, layout_of, sync
from tiny_models import tiny_lm

pytestmark = pytest.mark.timeout(300)  # the server's start is part of the first test's time


async def outlasts_syncs(engine: Any, lm: torch.nn.Module) -> None:
    """A request that was sent during the pause is sampled after it, with the weights of the sync during the pause."""
    await engine.reconcile(layout_of(lm))
    await sync(lm, engine, 0)
    await engine.pause("wait")
    late = asyncio.create_task(engine.generate(ask("late", range(10, 30))))
    await sync(lm, engine, 1)
    await asyncio.sleep(0.05)
    assert engine.stats().waiting == 1 and engine.stats().running == 0 and not late.done()
    await engine.resume()
    assert set((await late).versions) == {1}


@pytest.mark.parametrize("client", [sglang_client, endpoint_client])
def test_a_pause_outlasts_a_sync(sglang_server, client):
    async def main() -> None:
        engine = client(sglang_server)
        try:
            await asyncio.wait_for(outlasts_syncs(engine, tiny_lm("qwen2", tie_word_embeddings=True)), 100)
        finally:
            await engine.close()

    asyncio.run(main())
