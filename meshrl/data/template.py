"""The chat template that a config gives in place of the tokenizer's own: its text, and the variables that it reads.
Nothing is rendered here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshrl.core.errors import DataError
from meshrl.core.files import Unreadable, read_text
from meshrl.core.lookup import similar_names


def is_template_text(given: str) -> bool:
    """Whether this is a template itself and not the path of one: without Jinja in it every prompt would be the same."""
    return "{{" in given or "{%" in given


def template_text(given: str | Path) -> str:
    """The template's text as given, or of the file that the path names.

    Raises: DataError, in words that follow the path, for a file that can't be read or holds no template.
    """
    if isinstance(given, str) and is_template_text(given):
        return given
    try:
        text = read_text(Path(given))
    except Unreadable as cause:
        raise DataError(str(cause)) from cause
    if not is_template_text(text):
        raise DataError(f"has neither {{{{ nor {{% in it, so every prompt would read {text[:60]!r}")
    return text


def variables_read_by(text: str) -> set[str]:
    """The variables that a template reads and does not set itself.

    Raises: DataError, in words that follow the template's name, for what is not valid Jinja.
    """
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables

    class Generation(Extension):
        """Transformers' {% generation %}, which marks what the assistant says; its contents are ordinary Jinja."""

        tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        return find_undeclared_variables(Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(text))
    except TemplateSyntaxError as cause:
        lines = text.splitlines()
        line = lines[cause.lineno - 1].strip() if 0 < cause.lineno <= len(lines) else ""
        what = (cause.message or "").rstrip(".")  # the caller ends the sentence
        raise DataError(f"is not valid Jinja in line {cause.lineno} ({line:.120}): {what}") from cause
    except RecursionError as cause:
        raise DataError("is not Jinja that can be read: blocks stand hundreds deep in each other") from cause


def require_read(variables: Iterable[str], reads: set[str]) -> None:
    """Raises: DataError for a variable of chat_template_kwargs that would have no effect."""
    for name in variables:
        if name not in reads:
            near = similar_names(name, reads, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(
                f"chat_template_kwargs.{name} would have no effect: the chat template does not read it. It reads "
                f"{', '.join(sorted(reads)) or 'no variable'}.{hint} Remove it, or correct its name"
            )
