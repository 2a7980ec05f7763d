"""Programs of endpoint agents, which ask a model by HTTP as users' programs do, without an SDK."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx2

ENVIRONMENT = ("OPENAI_BASE_URL", "OPENAI_API_KEY")


async def post(url: str, key: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer, or of the events of a stream."""
    async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def chat(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    await post(f"{base_url}/chat/completions", api_key, {"model": "any", "messages": messages})


async def streamed(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    events = await post(f"{base_url}/chat/completions", api_key, {"messages": messages, "stream": True})
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")


async def by_tokens(url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    """Renders by itself, and asks the token route."""
    from tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    await post(f"{url}/inference/v1/generate", api_key, {"token_ids": ids, "sampling_params": {"temperature": 0.5}})


def blocking(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    asyncio.run(chat(base_url, api_key, messages))


def ends_badly(base_url: str, api_key: str, messages: list[dict[str, Any]], prompt: dict[str, Any]) -> float | None:
    """Ends in another way for each prompt, with children that outlive it."""
    kind = prompt["meta"]["ending"]
    if kind != "no_call":
        blocking(base_url, api_key, messages)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if kind == "raises":
        raise KeyError("no such room")
    if kind == "exits":
        os._exit(3)
    if kind == "hangs":
        time.sleep(600)
    if kind == "slow":
        time.sleep(3)
    return "much" if kind == "bad_reward" else None  # type: ignore[return-value]


def main() -> None:
    with open(os.environ["MESHRL_TASK"]) as file:
        task = json.load(file)
    url, key = (os.environ[name] for name in ENVIRONMENT)
    blocking(url, key, task["messages"])
    with open(os.environ["MESHRL_RESULT"], "w") as file:
        json.dump({"reward": 0.0}, file)


if __name__ == "__main__":
    main()
