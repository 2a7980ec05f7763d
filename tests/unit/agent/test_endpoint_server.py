"""Keys, limits and settings of the endpoint's server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from endpoint_clients import KEY, USER, answers, send, served

from meshrl.agent.endpoint import server
from meshrl.agent.endpoint.conversation import MAX_AT_ONCE
from meshrl.agent.endpoint.dialect import MUST_BE, REPLACED
from meshrl.agent.endpoint.server import FORMATS
from meshrl.core.errors import ConfigError, RankFailure

CHAT = "/v1/chat/completions"
DOCS = Path(__file__).parents[3] / "docs"


def status(path=CHAT, body=None, key=KEY, answer=lambda request: "ab", **changes):
    """(HTTP status, body) of one request."""

    async def ask():
        async with served(answer, **changes) as at:
            found = await send(at.url, path, {"messages": [USER]} if body is None else body, key)
            return found.status_code, found.json(), at

    return asyncio.run(ask())


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.parametrize("key", ["other", KEY + "x", KEY[:-1]])
def test_other_keys_are_refused_in_the_form_of_the_dialect(path, key):
    code, body, at = status(path, key=key)
    assert code == 401 and "key is not valid" in body["error"]["message"] and at.notes == []
    assert at.policy.requests == []
    assert body["error"]["type"] == "authentication_error"


def test_an_unknown_route_is_an_error_that_clients_can_read():
    code, body, _ = status("/v1/completions")
    assert code == 404 and "POST /v1/completions is no route of this server; it has POST /v1/chat" in str(body["error"])


@pytest.mark.parametrize(
    "body,code,text",
    [
        ([], 400, "it must be an object"),
        ({"messages": []}, 400, "messages is empty"),
        ({"messages": "ab"}, 400, "must be a list"),
        ({"messages": [[]]}, 400, "must be a list"),
        ({"messages": [USER] * 5000}, 400, "at most 4096"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, r"messages\[0\]: role is 'robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "text only"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, 400, "last message is the assistant's"),
        ({"messages": [USER], "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"messages": [USER], "max_tokens": "5"}, 400, "max_tokens is '5'"),
        ({"messages": [USER], "temperature": "hot"}, 400, "temperature is 'hot'"),
        ({"messages": [USER], "stop": [""]}, 400, "stop is"),
        ({"messages": [USER], "top_k": 0.5}, 400, "top_k is 0.5; it must be an integer"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, 400, "its type must be function"),
        ({"messages": [USER], "tools": [{"function": {}}]}, 400, "a tool has the name None"),
        ({"messages": [USER], "tools": [{"function": {"name": "f", "parameters": [1]}}]}, 400, "must be a JSON schema"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}, USER]}, 400, "function None"),
        ({"messages": [USER] * 30 + [{"role": "user", "content": "1" * 9000}]}, 400, "context_length_exceeded"),
    ],
)
def test_bodies_that_are_refused(body, code, text):
    found, answer, at = status(body=body)
    assert found == code and re.search(text, answer["error"]["message"]) and at.policy.requests == []


def raw(content: bytes, wait_s=20.0):
    """What the server sends to these bytes, until it closes the connection."""

    async def ask():
        async with served(answers("ab")) as at:
            host, port = at.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(content)
            found = b""
            with suppress(ConnectionResetError):  # it closes without reading the rest
                while part := await asyncio.wait_for(reader.read(1000), wait_s):
                    found += part
            writer.close()
            return found.decode()

    return asyncio.run(ask())


def head(path=CHAT, **headers):
    lines = [f"POST {path} HTTP/1.1", "host: a", f"authorization: Bearer {KEY}"]
    return "\r\n".join([*lines, *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()), "", ""]).encode()


def test_bytes_that_are_no_request_of_a_client(monkeypatch):
    monkeypatch.setattr(server, "HEADERS_S", 0.4)
    monkeypatch.setattr(server, "BODY_S", 0.4)
    assert raw(b"") == ""  # closed
    assert raw(head()[:-2]) == ""
    assert raw(b"nonsense\r\n\r\n").startswith("HTTP/1.1 400")
    assert raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)[:12] in ("HTTP/1.1 400", "")
    assert raw(head(content_length=100) + b"{").startswith("HTTP/1.1 408")
    assert raw(head(content_length=1 << 40)).startswith("HTTP/1.1 413")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    assert raw(head(transfer_encoding="chunked") + chunk * 17).startswith("HTTP/1.1 413")
    deep = b"[" * 100_000
    assert "400" in raw(head(content_length=len(deep), connection="close") + deep).split("\r\n")[0]
    nested = json.dumps({"messages": [USER], "tools": json.loads("[" * 100 + "]" * 100)}).encode()
    assert "more than 64 levels" in raw(head(content_length=len(nested), connection="close") + nested)
    half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'  # of a surrogate pair
    assert raw(head(content_length=len(half), connection="close") + half).startswith("HTTP/1.1 400")
    assert raw(head("/v1/other", connection="close")).startswith("HTTP/1.1 404")


@pytest.mark.slow
def test_a_request_on_a_connection_that_was_idle_for_five_seconds_is_answered():
    """uvicorn closes such a connection by default, also one on which httpx has just sent a request: its pool keeps
    connections for five seconds, too. Here both times end within one iteration of the loop."""
    body = json.dumps({"messages": [USER]}).encode()
    request = head(content_length=len(body)) + body

    async def ask():
        async with served(answers("ab", "ab")) as at:
            host, port = at.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            first, loop = await reader.read(10_000), asyncio.get_running_loop()
            loop.call_later(4.5, time.sleep, 1.0)
            loop.call_later(4.9, writer.write, request)
            second = await asyncio.wait_for(reader.read(10_000), 20)
            writer.close()
            return first, second

    assert all(answer.startswith(b"HTTP/1.1 200") for answer in asyncio.run(ask()))


def test_idle_connections_give_way_to_requests(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 40)

    async def ask():
        async with served(lambda request: "ab") as at:
            host, port = at.url.removeprefix("http://").split(":")
            idle = [socket.create_connection((host, int(port))) for _ in range(100)]
            for each in idle[::2]:
                each.sendall(b"POST /v1/chat")
            bodies = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(16)]
            found = await asyncio.gather(*(send(at.url, CHAT, body) for body in bodies))
            for each in idle:
                each.close()
            return [answer.status_code for answer in found]

    assert asyncio.run(ask()) == [200] * 16


def test_an_engine_that_fails_is_reported_to_the_client_and_ends_the_attempt():
    def fails(request):
        raise RankFailure(1, "rollout", "it is gone")

    code, body, at = status(answer=fails)
    assert code == 503 and "it is gone" in body["error"]["message"] and at.conversation.failed.is_set()


def test_too_many_requests_at_once_are_refused_for_a_second():
    async def ask():
        async with served(answers("ab")) as at:

            async def never(request):
                await asyncio.sleep(100)

            at.conversation._generate = never
            sent = [
                asyncio.create_task(send(at.url, CHAT, {"messages": [USER], "seed": i})) for i in range(MAX_AT_ONCE)
            ]
            await asyncio.sleep(0.5)
            answer = await send(at.url, CHAT, {"messages": [USER], "seed": -1})
            for task in sent:
                task.cancel()
            return answer.status_code, answer.headers["retry-after"]

    assert asyncio.run(ask()) == (429, "1")


def test_a_port_that_is_taken_is_named():
    taken = socket.create_server(("127.0.0.1", 0))

    async def open_it():
        endpoint = server.Endpoint({}.get, "m", 1, print)
        async with endpoint.opened(port=taken.getsockname()[1]):
            pass

    with pytest.raises(ConfigError, match="Give another port"):
        asyncio.run(open_it())
    taken.close()


def documented_settings():
    """(setting, what the endpoint does with it) of the table in docs/agents.md."""
    text = (DOCS / "agents.md").read_text()
    return [
        (name, row[1].strip())
        for line in text.splitlines()
        if len(row := line.strip("|").split("|")) == 2 and row[1].strip() in ("used", "replaced", "refused")
        for name in re.findall(r"`(\w+)`", row[0])
    ]


REFUSED_VALUE = {"logprobs": None, "tool_choice": "required", "response_format": {"type": "json_object"}}
USED_VALUE = {"max_tokens": 3, "max_completion_tokens": 3, "stop": ["b"], "logprobs": True, "tools": []}


def test_the_table_of_settings_has_all_of_them():
    found = {name for name, what in documented_settings() if what == "refused"}
    assert found == {*MUST_BE}
    assert {name for name, what in documented_settings() if what == "replaced"} == {*REPLACED}


@pytest.mark.parametrize("name,what", documented_settings())
def test_each_setting_does_what_its_row_states(name, what):
    other = 5 if name in ("top_k", "seed") else 0.5
    value = {"used": USED_VALUE.get(name, 1), "replaced": other, "refused": REFUSED_VALUE.get(name, [7])}[what]
    code, body, at = status(body={"messages": [USER], name: value})
    if what == "refused":
        assert code == 400 and body["error"]["message"].startswith(f"{name} is ") and at.policy.requests == []
        return
    assert code == 200
    (request,) = at.policy.requests
    if what == "replaced":
        assert at.notes == [f"a client asked for a {name} of its own: the run's own sampling is used in its place"]
        assert request.sampling == at.conversation.ctx.sampling
    elif "max" in name:
        assert (request.max_new_tokens, body["choices"][0]["finish_reason"]) == (3, "stop")
    elif name == "stop":
        assert request.sampling.stop == ("b",)
    elif name == "logprobs":
        assert len(body["choices"][0]["logprobs"]["content"]) == 3
