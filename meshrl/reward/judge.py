"""The reward kind `judge`: a model behind an OpenAI-compatible chat endpoint grades a completion. A question that can't
be asked, or whose answer has no score, is a failed grading. Requests are repeated, because they change nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from string import Formatter
from typing import Any
from urllib.parse import urlsplit

import httpx2

from meshrl.core.errors import RewardError
from meshrl.reward.kinds import format_match

TEMPLATE = """Task:
{prompt}
{reference}
Answer to be graded:
{completion}

State briefly what is right and what is wrong in the answer. Then end with one line `Score: N`, where N is a number from
{low} (of no use) to {high} (could not be better)."""
_REFERENCE = "\nReference answer, which is right:\n{}\n"
_NAMES = ("prompt", "completion", "answer", "reference", "low", "high")
_AFTER = r"[\"'*_\s]*(?:\([^)\n]{0,80}\)[\"'*_\s]*)?(?::|=|\bis\b|\bof\b)[\"'*_\s]*"
REGEX = rf"(?i)\bscore{_AFTER}(-?\d+(?:\.\d+)?)|\A\s*(-?\d+(?:\.\d+)?)\s*\Z"  # or nothing but a number

MAX_CACHED = 1024  # questions whose scores a worker stores
_REPEATED = (None, 408, 429, 500, 502, 503, 504, 529)  # None: no answer. 529: overloaded
_FIRST_WAIT_S = 0.5  # before a request is repeated; each further wait is twice as long

_NO_PROXY = dict.fromkeys(f"all://{name}" for name in ("localhost", "127.0.0.1", "[::1]"))
# Made at the import, because loading certificates takes 0.1 s. The time limit is that of the grading. No connection
# stays open: a new one costs little next to an answer.
_CLIENT = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_keepalive_connections=0), mounts=_NO_PROXY)
_asked: dict[str, tuple[asyncio.Lock, list[float]]] = {}  # question -> (locked while it is asked, its votes)


async def judge(
    completion: str,
    answer: Any,
    *,
    prompt: dict[str, Any],
    url: str,
    model: str,
    template: str = TEMPLATE,
    regex: str = REGEX,
    scale: Sequence[float] = (0, 10),
    votes: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    extra_body: dict[str, Any] | None = None,
    api_key_env: str | None = None,
    max_tries: int = 4,
    max_parallel: int = 64,
    calibration: str | None = None,
    min_agreement: float | None = None,
) -> float:
    """The mean score of `votes` answers of the judge, 0.0 to 1.0; docs/judges.md describes the arguments. The worker
    enforces max_parallel, and the self-test reads calibration and min_agreement. Raises: RewardError."""
    if answer is None and "{answer}" in template:
        raise RewardError("the template has {answer}, but the row has none: set data.answer to the name of its column")
    messages = [{"role": "", "content": "", **message} for message in prompt["messages"] or ()]
    form = "{content}" if len(messages) == 1 else "{role}: {content}"
    values = {"prompt": "\n\n".join(form.format(**message) for message in messages), "completion": completion}
    values |= {"answer": answer, "reference": "" if answer is None else _REFERENCE.format(answer)}
    content = template.format(**values, low=scale[0], high=scale[1])
    fields = {"temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
    body = {name: value for name, value in fields.items() if value is not None}
    body |= {"model": model, "messages": [{"role": "user", "content": content}]}
    question = json.dumps([url, body, regex, scale, votes])
    asking, scores = _asked[question] = _asked.pop(question, (asyncio.Lock(), []))  # now the newest
    if len(_asked) > MAX_CACHED:
        del _asked[next(iter(_asked))]
    async with asking:  # an equal question waits for this one's score
        if not scores:
            replies = await asyncio.gather(*(_ask(url, api_key_env, body, max_tries) for _ in range(votes)))
            scores += [score_in(reply, regex, scale) for reply in replies]
    return sum(scores) / votes


def score_in(reply: str, regex: str, scale: Sequence[float]) -> float:
    """The last score in the judge's answer, from 0.0 for the low end of the scale to 1.0 for the high end. reply: the
    JSON of a chat completion. Raises: RewardError."""
    (low, high), text, end = scale, reply, None
    try:
        choice = json.loads(reply)["choices"][0]
        text, end = choice["message"]["content"], choice.get("finish_reason")
        found = [next(filter(None, match.groups()), "") for match in re.finditer(regex, text)]
        score = (float(found[-1]) - low) / (high - low)
        if 0 <= score <= 1 and end != "length":
            return score
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    raise RewardError(f"no score from {low} to {high} in the judge's answer {str(text)[-200:]!r}, finish_reason {end}")


async def _ask(url: str, api_key_env: str | None, body: Any, max_tries: int) -> str:
    """The answer to one request. Waits before it is repeated, at least as long as the server requires."""
    key = os.environ.get(api_key_env or "", "").strip()  # files with secrets end in a newline
    if api_key_env and not (key and key.isascii() and key.isprintable()):  # the value may stand in no error
        state = "has other characters than an API key" if key else "is not set"
        raise RewardError(f"the environment variable {api_key_env} (api_key_env) {state}; set it to the API key")
    headers = {"Authorization": f"Bearer {key}"} if api_key_env else {}
    address, num_tries = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions", 0
    while True:
        num_tries += 1
        try:
            answer = await _CLIENT.post(address, json=body, headers=headers)
            if answer.status_code == httpx2.codes.OK:
                return answer.text
            status, wait = answer.status_code, answer.headers.get("retry-after", "")  # seconds, or a date
            problem = f"status {status}, {answer.text[:200]!r}"
        except httpx2.TransportError as error:
            status, wait, problem = None, "", f"no answer, {type(error).__name__}: {error}"
        problem = f"{address}, request {num_tries} of at most {max_tries}: {problem}"
        if status not in _REPEATED or num_tries >= max_tries:
            raise RewardError(problem)
        wait_s = max(_FIRST_WAIT_S * 2 ** (num_tries - 1), float(wait) if wait.isdecimal() else 0.0)
        print(f"judge: {problem}; the next request follows in {wait_s:g} s")
        await asyncio.sleep(wait_s)


def check_args(completion: str, answer: Any, **args: Any) -> None:
    """Raises: ValueError for arguments that a judge can't have."""
    args = {**(judge.__kwdefaults__ or {}), **args}
    url, scale, share = urlsplit(str(args["url"])), args["scale"], args["min_agreement"]
    names = {name for _, name, *_ in Formatter().parse(args["template"])} - {None}
    format_match("", None, regex=args["regex"])
    for name, is_right, allowed in (
        ("url", url.scheme in ("http", "https") and url.hostname, "an address such as http://127.0.0.1:8000/v1"),
        ("url", not url.username and url.port != 0, "an address without a password; api_key_env names a key"),
        ("template", {"completion"} <= names <= {*_NAMES}, f"a text with {{completion}}; in braces only {_NAMES}"),
        ("regex", re.compile(args["regex"]).groups, "one with a group for the number, such as Score: ([0-9]+)"),
        ("scale", len(scale) == 2 and scale[1] - scale[0] > 0, "the lowest and the highest score, such as [0, 10]"),
        *((n, type(args[n]) is int and args[n] > 0, "1, 2, 3 ...") for n in ("votes", "max_tries", "max_parallel")),
        ("max_parallel", args["max_parallel"] <= 64, "at most 64, the gradings that a worker gets at a time"),
        ("temperature", args["votes"] == 1 or args["temperature"], "above 0, because votes at 0 are equal"),
        ("min_agreement", share is None or (0 <= share <= 1 and args["calibration"]), "0 to 1, with a calibration"),
    ):
        if not is_right:
            raise ValueError(f"{name} is {args[name]!r}; it must be {allowed}")
