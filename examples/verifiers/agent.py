"""A task of verifiers as an agent: agent.kind endpoint runs this program, by a Python of its own, for each attempt.

    python -m venv verifiers-env && verifiers-env/bin/pip install "verifiers==0.4.*" uv
    PATH=verifiers-env/bin:$PATH meshrl train my.yaml    # the harness starts its programs by uv

    agent: {kind: endpoint, args: {command: [verifiers-env/bin/python, examples/verifiers/agent.py]}}
    reward: {terms: {}}    # the rewards are those of the task
    data: {answer: null}   # rows: {"question": "task 0", "task": 0}, {"question": "task 1", "task": 1} ...

The column `task` is the index of the task, whose prompt is the first message; that of the row is only a name. Put your
own taskset in the place of Letters, and its harness in the place of "null", which is a chat with the task's tools.
"""

import asyncio
import json
import os
from pathlib import Path

import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def share(self, trace: vf.Trace) -> float:
        """The share of letters of the word in the answer."""
        text = str(trace.last_message.content or "").lower()
        return sum(letter in self.data.word for letter in text) / max(1, len(text))

    @vf.metric
    async def num_letters(self, trace: vf.Trace) -> float:
        return len(str(trace.last_message.content or ""))


class Letters(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> list[WordTask]:
        words = ("cab", "bad", "face", "bead")
        return [WordTask(WordData(word=w, prompt=f"Letters of {w}?"), self.config.task) for w in words]


async def main() -> None:
    index = json.loads(Path(os.environ["MESHRL_TASK"]).read_text())["prompt"]["meta"]["task"]
    task = next(iter(Letters(vf.TasksetConfig()).include(idx=[index])))
    config = vf.AgentConfig(
        harness={"id": "null"},
        runtime=vf.SubprocessConfig(),
        model="policy",
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
    )
    async with vf.Agent(config) as agent:
        trace = await agent.run(task)
    if not trace.ok:
        raise SystemExit(str(trace.errors[-1]))
    Path(os.environ["MESHRL_RESULT"]).write_text(json.dumps({"reward": trace.reward, "metrics": trace.metrics}))


asyncio.run(main())
