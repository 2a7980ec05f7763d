"""Error events in the streams of servers with OpenAI's API, which differ in form."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from meshrl.core.errors import EngineFailure, RequestError
from meshrl.rollout.server.http import HttpClient


def events(data: str) -> list[object]:
    async def run() -> list[object]:
        client = HttpClient("server")
        await client.close()
        answer = httpx2.Response(200, content=f"data: {data}\n\ndata: [DONE]\n\n".encode())
        client._client = httpx2.AsyncClient(
            base_url="http://server", transport=httpx2.MockTransport(lambda request: answer)
        )
        try:
            return [event async for event in client.stream("/v1/completions", {})]
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ('{"message": "too long", "code": "context_length_exceeded"}', EngineFailure),
        ('{"message": "too long", "code": 400}', RequestError),
        ('{"message": "too long", "code": 7}', EngineFailure),
        ('"too long"', EngineFailure),
    ],
)
def test_an_error_event_in_any_form_is_an_error_with_its_text(error: str, kind: type[Exception]):
    with pytest.raises(kind, match="too long"):
        events(f'{{"error": {error}}}')


def test_an_event_without_an_error_is_not_one():
    assert events('{"error": null, "choices": []}') == [{"error": None, "choices": []}]
