"""Tools that an agent may call, and their limits. A tool's answer is text for the model, and so are a refusal and an
exception of the tool.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import inspect
import json
import math
import operator
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshrl.agent.parsing import ToolCall
from meshrl.core.errors import ConfigError, DataError
from meshrl.data.chat import function_schema
from meshrl.reward.replies import error_text, one_line

MAX_EXPRESSION_CHARS = 256
MAX_INT_BITS = 2048  # about 616 digits: enough for any real exercise, too few to slow down the run
MAX_ANSWER_CHARS = 2000
MAX_RESULT_CHARS = 1 << 20  # a longer result is an error, not cut: it is made by mistake
MAX_AT_ONCE = 16  # calls of one answer, of which a degenerate one has thousands
ERROR = "error: "  # the beginning of an answer to a call that failed


class ToolError(Exception):
    """A call that can't be answered; its text is returned to the model, and the trajectory goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that the model may call. parameters: its keyword arguments as a JSON schema with `required`.

    function: an async function runs in the event loop. Any other runs in a thread for each call, so calls of several
    trajectories run at the same time. A result that is not a text becomes JSON.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that chat templates expect in `tools`."""
        body = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": body}


def check_limits(max_turns: Any, **seconds: Any) -> None:
    """Raises: ConfigError for limits that an agent can't have. seconds: by their names in agent.args."""
    if type(max_turns) is not int or max_turns < 1:
        raise ConfigError(f"agent.args.max_turns is {max_turns!r:.80}; it must be an integer of at least 1")
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ConfigError(f"agent.args.{name} is {value!r:.80}; it must be a number above 0 and below 1e6")


def as_tool(tool: Any, key: str) -> Tool:
    """A Tool as it is, and a function by its types and docstring.

    key: of the value in errors.
    """
    if isinstance(tool, Tool):
        return tool
    if not callable(tool) or isinstance(tool, type):
        shown = f"{type(tool).__name__} {tool!r:.80}"
        raise ConfigError(f"{key}: a tool is {shown}; it must be a function or a meshrl.agent.tools:Tool")
    try:
        return Tool(**function_schema(tool), function=tool)
    except DataError as cause:
        raise ConfigError(
            f"{key}: {getattr(tool, '__name__', tool)!r} is no tool: {cause}. Give each parameter a type, and the "
            "function a docstring that describes each of them under `Args:`, or make a meshrl.agent.tools:Tool of it"
        ) from cause


async def call_tools(tools: Mapping[str, Tool], calls: Sequence[ToolCall], timeout_s: float) -> list[str]:
    """The answers to the calls, in their order, as `call_tool` makes them. At most MAX_AT_ONCE of them run at once."""
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def answered(call: ToolCall) -> str:
        async with places:
            return await call_tool(tools, call, timeout_s)

    return await asyncio.gather(*map(answered, calls))


async def call_tool(tools: Mapping[str, Tool], call: ToolCall, timeout_s: float | None = None) -> str:
    """The answer to a call: the tool's text, or "error: ..." for a call that is malformed, unknown or refused, for an
    exception of the tool, and for a result that is binary, too large or not there after timeout_s. It has at most
    MAX_ANSWER_CHARS characters and is valid Unicode.

    A function that never returns keeps its thread. An async one that blocks the event loop, or ignores that it is
    cancelled, ends the run when the phase misses its deadline.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        if call.error:
            raise ToolError(call.error)
        name, arguments = call.name, json.loads(call.arguments)
        if name not in tools:
            raise ToolError(f"no tool is called {name!r}; there are: {', '.join(tools)}")
        tool = tools[name]
        allowed, required = set(tool.parameters.get("properties", ())), set(tool.parameters.get("required", ()))
        if not required <= set(arguments) <= allowed:
            raise ToolError(
                f"{name} takes the arguments {sorted(allowed)}, of which {sorted(required)} are required; got "
                f"{sorted(arguments)}"
            )
        for argument, value in arguments.items():
            _check_type(tool, argument, value)
        is_async = any(map(inspect.iscoroutinefunction, (tool.function, type(tool.function).__call__)))
        async with limit:
            call_it = partial(tool.function, **arguments)
            answer = call_it() if is_async else await CallThread(f"tool {name}").call(call_it, is_last=True)
            answer = await answer if inspect.isawaitable(answer) else answer
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=_as_json)
        if len(text) > MAX_RESULT_CHARS:
            raise ToolError(f"the result of {name} has {len(text)} characters; at most {MAX_RESULT_CHARS} are allowed")
    except ToolError as refusal:
        text = f"{ERROR}{refusal}"
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code: it may raise anything
        if is_being_cancelled(error):
            raise
        late = isinstance(error, TimeoutError) and limit.expired()
        text = f"{ERROR}{f'{call.name} did not return within {timeout_s:g} s' if late else _description(error)}"
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_ANSWER_CHARS else text[:MAX_ANSWER_CHARS] + "..."


def _as_json(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise ToolError(f"the result is binary ({len(value)} bytes); only text can be returned")
    return str(value)


def is_being_cancelled(error: BaseException) -> bool:
    """Whether the error is the end of this task by meshrl. A CancelledError may also come from a task of the user's
    code that it waits for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class CallThread:
    """A thread for functions that may block, which it calls in order.

    asyncio.to_thread is not used: the end of a run would wait for its threads, also for one that hangs, and they are
    too few for all trajectories of a step.
    """

    def __init__(self, name: str):
        self._jobs = queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, function: Callable[[], Any], is_last: bool = False) -> asyncio.Future[Any]:
        """Its result, or exception; a ToolError for one that is no Exception, such as sys.exit(). is_last: the thread
        then ends."""
        outcome = concurrent.futures.Future[Any]()
        outcome.set_running_or_notify_cancel()  # a cancelled call drops the outcome, and does not cancel it
        self._jobs.put((outcome, function))
        if is_last:
            self._jobs.put(None)
        return asyncio.wrap_future(outcome)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome, function = job
            try:
                outcome.set_result(function())
            except BaseException as error:  # user code. No future accepts StopIteration
                is_usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
                outcome.set_exception(error if is_usual else ToolError(_description(error)))
            del job, outcome, function


def _description(error: BaseException) -> str:
    return one_line(error_text(error))


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (),
}


def _check_type(tool: Tool, name: str, value: Any) -> None:
    """Raises: ToolError when the value is not of a type, or not one of the values, that the tool's schema allows."""
    schema = tool.parameters["properties"][name]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and (schema.get("nullable") or "null" in kinds):
        return
    allowed = tuple(each for kind in kinds for each in _TYPES.get(kind, (object,)))
    is_bool = isinstance(value, bool) and not {bool, object} & {*allowed}
    if kinds and (is_bool or not isinstance(value, allowed)):
        raise ToolError(f"{name} of {tool.name} must be of type {' or '.join(kinds)}, got {value!r:.80}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} of {tool.name} must be one of {schema['enum']}, got {value!r:.80}")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, + - * / // % ** and parentheses. Bounded in time and size."""
    if not isinstance(expression, str) or len(expression) > MAX_EXPRESSION_CHARS:
        raise ToolError(f"the expression must be a string of at most {MAX_EXPRESSION_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _evaluate(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    return str(value)


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if (  # before it is computed: 9**9**9 would never end
            isinstance(node.op, ast.Pow)
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * abs(right) > MAX_INT_BITS
        ):
            raise ToolError("the result is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ToolError("only numbers, + - * / // % ** and parentheses are allowed")


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ToolError("the result is too large")
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is not a real number")
    return value


_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

TOOLS: dict[str, Tool] = {
    "calculator": Tool(
        name="calculator",
        description="Evaluates an arithmetic expression.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 12"}},
            "required": ["expression"],
        },
        function=calculate,
    ),
}
