"""`meshrl serve`: a model behind chat APIs, and `meshrl chat --url`, which asks it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
from endpoint_clients import DIALECTS, KEY, USER, events_of, send
from tiny_run import write_run

from meshrl.agent.endpoint.server import Endpoint
from meshrl.cli import main
from meshrl.config.chat import ChatSettings
from meshrl.core.errors import RequestError
from meshrl.tools.chat import KEY_VARIABLE, Chat, LoadedModel, chat
from meshrl.tools.serve import ServedModel

GREEDY = ChatSettings(temperature=0, max_new_tokens=12, dtype="float32")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_run(folder)
    return str(folder / "model")


def with_server(model, ask, settings=GREEDY):
    loaded = LoadedModel(model, settings)

    async def run():
        served = ServedModel(loaded, loaded.engine())
        async with Endpoint({KEY: served}.get, "tiny", 100, print).opened() as url:
            return await ask(url)

    return asyncio.run(run())


def text_of(answer):
    return answer.json()["choices"][0]["message"]["content"] or ""


def test_every_dialect_answers_as_the_chat(model):
    *_, expected = Chat(LoadedModel(model, GREEDY), "tiny", None).answer("ab?")

    async def ask(url):
        return [(await each(url, [USER], [], stream))["content"] for each in DIALECTS.values() for stream in (0, 1)]

    texts = with_server(model, ask)  # Anthropic's form has a limit of its own, which is higher
    assert len(texts) == 6 and all(text.startswith(expected.split(" [cut")[0].rstrip()) for text in texts)


def test_a_stream_has_the_text_in_parts_as_they_are_sampled(model):
    async def ask(url):
        body = {"messages": [USER], "stream": True, "max_tokens": 40, "temperature": 1, "seed": 3}
        streamed, plain = await send(url, CHAT, body), await send(url, CHAT, {**body, "stream": False})
        parts = [event["choices"][0]["delta"].get("content") for event in events_of(streamed.text)]
        assert len([part for part in parts if part]) > 2
        assert "".join(part or "" for part in parts) == text_of(plain)

    with_server(model, ask)


def test_each_client_has_its_own_sampling(model):
    async def ask(url):
        def body(**settings):
            return {"messages": [USER], "max_tokens": 20, **settings}

        seeds = [await send(url, CHAT, body(temperature=1, seed=seed)) for seed in (1, 1, 2)]
        greedy = await send(url, CHAT, body())
        at_once = await asyncio.gather(*(send(url, CHAT, body(temperature=1, seed=s % 3)) for s in range(9)))
        texts = [text_of(answer) for answer in seeds]
        assert texts[0] == texts[1] != texts[2] and text_of(greedy) not in texts
        assert [text_of(answer) for answer in at_once] == [text_of(at_once[s % 3]) for s in range(9)]
        assert text_of(at_once[1]) == texts[0]

    with_server(model, ask)


def test_a_client_that_leaves_its_stream_ends_the_sampling(model):
    loaded = LoadedModel(model, ChatSettings(temperature=1, dtype="float32", max_new_tokens=100))

    async def run():
        engine = loaded.engine()
        async with Endpoint({KEY: ServedModel(loaded, engine)}.get, "tiny", 100, print).opened() as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            content = b'{"messages": [{"role": "user", "content": "ab?"}], "stream": true, "stop": ["\\u1234"]}'
            head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await reader.readuntil(b"data: ")
            writer.close()
            for _ in range(100):
                await asyncio.sleep(0.05)
                if not engine.has_work:
                    return

    asyncio.run(run())


def test_chat_by_url_continues_a_conversation_and_names_a_wrong_key(model, capsys, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    ready, done, urls = threading.Event(), threading.Event(), []

    async def hold(url):
        urls.append(url)
        ready.set()
        while not done.is_set():
            await asyncio.sleep(0.01)

    server = threading.Thread(target=with_server, args=(model, hold))
    server.start()
    try:
        assert ready.wait(60)
        chat([], ["ab?", "max_new_tokens=12"], None, url=urls[0])
        assert main(["chat", "--url", f"{urls[0]}/v1", "ab?", "max_new_tokens=12"]) == 0
        monkeypatch.setenv(KEY_VARIABLE, "wrong")
        with pytest.raises(RequestError, match="key is not valid"):
            chat([], ["ab?"], None, url=urls[0])
    finally:
        done.set()
        server.join()
    *_, expected = Chat(LoadedModel(model, GREEDY), "tiny", None).answer("ab?")
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == second == expected.split(" [cut")[0].rstrip("\n")


@pytest.mark.parametrize(
    "words,text",
    [
        (["chat"], "give a model, such as runs/NAME, or --url"),
        (["chat", "--url", "http://localhost:1", "--image", "a.png"], "--image does not fit --url"),
        (["serve", "nothing", "hello"], "'hello' is no setting"),
        (["serve", "/nowhere/model"], "does not exist"),
        (["serve", "m", "heat=1"], "heat is no setting"),
    ],
)
def test_wrong_command_lines(words, text, capsys):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2 and text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_by_a_signal(model, number, tmp_path):
    command = [sys.executable, "-m", "meshrl", "serve", model, "--port", "0"]
    with open(tmp_path / "log", "w+") as log:
        environment = {n: v for n, v in os.environ.items() if n != KEY_VARIABLE}
        server = subprocess.Popen(command, stderr=log, env=environment)
        try:
            while server.poll() is None and "try: " not in (text := (tmp_path / "log").read_text()):
                pass
            assert f"which {KEY_VARIABLE} would set: " in text
            server.send_signal(number)
            assert server.wait(30) == 0
        finally:
            server.kill()
