"""The server of `agent.kind: endpoint`: its CPU time for a call, and what it loses under an attack.

    python benchmarks/endpoint.py [--model FOLDER]  # whose tokenizer is used; default: one of the tests

The server runs in a process of its own, with a sampler that answers at once, so its CPU time is what the endpoint adds:
HTTP, JSON, the search for the turn that a request continues, rendering, and parsing. 64 agents, in this process, hold
conversations of up to 20 kB with a tool. The best of five rounds is the figure: other work on the machine only adds
time.

In the attack, 2,000 connections send nothing and 500 send a body byte by byte, while the agents hold their
conversations, and others guess keys and send bodies that are malformed or too large.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from typing import Any

import httpx2
import numpy as np
import psutil
from measure import ROOT, Report, parser

sys.path.append(str(ROOT / "tests"))

AGENTS, TURNS, ROUNDS = 64, 10, 5
IDLE, SLOW = 2000, 500
QUESTION = "Tom has 3 apples, buys 4 more, and gives 2 of them to Ann. How many does he have? " * 24  # 2 kB
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def serve(tokenizer_folder: str) -> None:
    """The server's process: lines `KEYS` on stdin open new conversations; the answer is their keys."""
    from scripted_agent import scripted_context
    from tiny_tokenizers import SHOWS_TOOLS, tiny_tokenizer

    from meshrl.agent.endpoint.conversation import Conversation
    from meshrl.agent.endpoint.server import Endpoint
    from meshrl.agent.loop import start_trajectory
    from meshrl.core.types import Prompt, Request, SamplingParams, Turn
    from meshrl.data.chat import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder, "chatml_tools") if tokenizer_folder else tiny_tokenizer(SHOWS_TOOLS)
    text = "There are 5 apples."
    answer = np.array([*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id], np.int32)
    num = len(answer)

    async def generate(request: Request) -> Turn:
        return Turn(
            context_ids=request.context_ids,
            output_ids=answer.copy(),
            logprobs=np.full(num, -0.5, np.float32),
            versions=np.zeros(num, np.int32),
            stop_reason="stop",
            sampling=request.sampling,
            seed=request.seed,
        )

    async def run() -> None:
        opened: dict[str, Conversation] = {}
        sampling = SamplingParams(stop_token_ids=(tokenizer.eos_token_id,))
        ctx = scripted_context(tokenizer=tokenizer, sampling=sampling, max_new_tokens=100, max_context_tokens=1 << 20)
        async with Endpoint(opened.get, "policy", 1 << 20, lambda line: print(line, file=sys.stderr)).opened() as url:
            print(url, flush=True)
            while (await asyncio.to_thread(sys.stdin.readline)).strip() == "KEYS":
                opened.clear()
                for i in range(AGENTS):
                    trajectory = start_trajectory(Prompt(id=f"p{i}", ordinal=i, messages=[]), 0, ctx)
                    opened[secrets.token_hex(16)] = Conversation(trajectory, generate, ctx, print)
                print(json.dumps([*opened]), flush=True)

    asyncio.run(run())


class Server:
    def __init__(self, tokenizer: str):
        command = [sys.executable, __file__, "--server", tokenizer]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._line()
        self.facts = psutil.Process(self.process.pid)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def keys(self) -> list[str]:
        assert self.process.stdin is not None
        print("KEYS", file=self.process.stdin, flush=True)
        found: list[str] = json.loads(self._line())
        return found

    def cpu_s(self) -> float:
        times = self.facts.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


async def converse(client: httpx2.AsyncClient, url: str, key: str, number: int) -> int:
    """The requests that were answered."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{number}.{turn}: {QUESTION}"})
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        answer = await client.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        if answer.status_code != 200:
            return turn
        messages.append(answer.json()["choices"][0]["message"])
    return TURNS


async def round_of(url: str, keys: list[str]) -> int:
    limits = httpx2.Limits(max_connections=AGENTS, max_keepalive_connections=AGENTS)
    async with httpx2.AsyncClient(trust_env=False, timeout=300, limits=limits) as client:
        return sum(await asyncio.gather(*(converse(client, url, key, i) for i, key in enumerate(keys))))


async def attack(url: str, keys: list[str]) -> dict[str, int]:
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {keys[0]}\r\n"
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(IDLE)]
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(SLOW)]
    for _, writer in slow:
        writer.write(f"{head}content-length: 100000\r\n\r\n".encode())
    ended = asyncio.Event()
    counts = {"guesses": 0, "guesses answered": 0, "malformed": 0, "malformed answered": 0}

    async def trickle() -> None:
        while not ended.is_set():
            for _, writer in slow:
                writer.write(b" ")
            await asyncio.sleep(0.5)

    async def guess() -> None:
        async with httpx2.AsyncClient(trust_env=False, timeout=300) as client:
            while not ended.is_set():
                guessed = {"Authorization": f"Bearer {secrets.token_hex(16)}"}
                answer = await client.post(f"{url}/v1/chat/completions", json={"messages": []}, headers=guessed)
                counts["guesses"] += 1
                counts["guesses answered"] += answer.status_code != 401
                bad = secrets.choice([b"[" * 100_000, b"{" + b"x" * 1000, b"\xff" * 50, b"17" * (9 << 20)])
                own = {"Authorization": f"Bearer {keys[0]}"}
                try:
                    answer = await client.post(f"{url}/v1/chat/completions", content=bad, headers=own)
                    counts["malformed answered"] += answer.status_code not in (400, 413)
                except httpx2.TransportError:  # it is closed while the body is sent
                    pass
                counts["malformed"] += 1
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(each()) for each in (trickle, guess)]
    counts["answered"] = await round_of(url, keys)
    ended.set()
    await asyncio.gather(*tasks)
    for _, writer in [*idle, *slow]:
        writer.transport.abort()
    return counts


def main() -> None:
    args = parser(__doc__, ROUNDS).parse_args()
    report = Report("endpoint", args)
    server = Server(str(args.model or ""))
    try:
        asyncio.run(round_of(server.url, server.keys()))  # imports, and the tables of the tokenizer
        costs = []
        for _ in range(1 if args.smoke else args.rounds):
            before = server.cpu_s()
            answered = asyncio.run(round_of(server.url, server.keys()))
            costs.append((server.cpu_s() - before) / answered * 1e3)
        report.raw["cpu_ms_of_a_call"] = costs
        report.bar("cpu_ms_of_a_call", report.figure("cpu_ms_of_a_call", min(costs)), at_most=3.0)
        keys, before_bytes, started = server.keys(), server.facts.memory_info().rss, time.monotonic()
        counts = asyncio.run(attack(server.url, keys))
        grown = (server.facts.memory_info().rss - before_bytes) / 1e6
        report.raw["attack"] = counts | {"seconds": time.monotonic() - started}
        lost = AGENTS * TURNS - counts["answered"]
        report.bar("lost_requests", report.figure("lost_requests", lost), at_most=0)
        report.bar("answered_guesses", report.figure("answered_guesses", counts["guesses answered"]), at_most=0)
        wrong = counts["malformed answered"]
        report.bar("accepted_malformed_bodies", report.figure("accepted_malformed_bodies", wrong), at_most=0)
        report.bar("grown_mb", report.figure("grown_mb", grown), at_most=100.0)
    finally:
        server.close()
    report.finish(["cpu_ms_of_a_call"])


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["--server"]:
        serve(sys.argv[2])
    else:
        main()
