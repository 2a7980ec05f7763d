"""An agent of one's own: a loop with a tool that asks a chat API by OpenAI's SDK. It knows nothing of training."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from meshrl.agent.tools import TOOLS, ToolError, calculate

CLIENT = AsyncOpenAI(api_key="none")


async def solve(base_url: str, api_key: str, model: str, messages: list[dict[str, Any]]) -> None:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    while True:
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=[TOOLS["calculator"].schema]
        )
        choice = answer.choices[0]
        if choice.finish_reason != "tool_calls":
            return
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            try:
                result = calculate(json.loads(call.function.arguments)["expression"])
            except ToolError as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
