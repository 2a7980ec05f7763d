"""Error events in the streams of servers with OpenAI's API, which differ in form."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from meshrl.core.errors import EngineFailure, RequestError
from meshrl.rollout.server.engine import Gate
from meshrl.rollout.server.http import HttpClient, fetch


def answered(content: str, call: Callable[[HttpClient], Awaitable[Any]]) -> Any:
    """What the call returns when the server answers with this text."""

    async def run() -> Any:
        client = HttpClient("server")
        await client.close()
        answer = httpx2.Response(200, content=content.encode())
        client._client = httpx2.AsyncClient(
            base_url="http://server", transport=httpx2.MockTransport(lambda request: answer)
        )
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def events(data: str) -> list[object]:
    async def call(client: HttpClient) -> list[object]:
        return [event async for event in client.stream("/v1/completions", {})]

    return answered(f"data: {data}\n\ndata: [DONE]\n\n", call)


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


def test_an_answer_that_is_not_json_is_an_error_with_server_and_path():
    assert answered("", lambda client: client.post("/reload")) is None
    with pytest.raises(EngineFailure, match="server answered /reload with 'done', which is not JSON"):
        answered("done", lambda client: client.post("/reload"))


def test_the_address_of_a_web_page_is_an_error_with_its_text(tmp_path: Path):
    (tmp_path / "models").write_text("<html>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(EngineFailure, match=f"{url} answered /models with '<html>', which is not JSON"):
            fetch("/models", url)
        server.shutdown()


def test_a_request_that_is_cancelled_at_a_shut_gate_leaves_no_task():
    async def run() -> set[asyncio.Task[Any]]:
        async def abort(ids: list[str]) -> None:
            raise AssertionError("none was sent")

        gate = Gate(abort)
        gate.shut()

        async def request() -> None:
            async with gate.admission("a"):
                raise AssertionError("the gate is shut")

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(run()) == set()
