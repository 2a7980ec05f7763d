"""A tool that runs Python programs of the model in isolation."""

from __future__ import annotations

from meshrl.agent.tools import MAX_ANSWER_CHARS, Tool, ToolError, as_tool
from meshrl.process.isolation import Isolation, Limits


def python_tool(sandbox: str, timeout_s: float, key: str) -> Tool:
    """The tool `python`. sandbox: a kind of meshrl/process/isolation.py. key: of it in errors. Raises: ConfigError when
    programs can't be isolated so."""
    isolation = Isolation(sandbox, key, Limits(wall_s=timeout_s))

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is left of earlier programs.

        Args:
            code: the program, which must print its results
        """
        ended = isolation.run_python(code)
        if ended.fault:  # the end of the output states the exception
            raise ToolError(f"{ended.fault}\n{ended.output[-(MAX_ANSWER_CHARS // 2) :]}".strip())
        return ended.output or "(it printed nothing)"

    return as_tool(python, key)
