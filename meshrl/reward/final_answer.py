"""The part of a completion that states its final answer, in a form that math-verify reads.

Models write the same answer in many styles: after reasoning between think tags, between answer tags, in the last of
several boxes, after the mark `#### ` of GSM8K, with Markdown emphasis, typographic dashes or Unicode operators.
meshrl.reward.plain_text reads answers in a sentence or with a unit.
"""

from __future__ import annotations

import re

from meshrl.reward.plain_text import normalized, number_with_unit, stated_expression, statement

MAX_TEXT_CHARS = 8_000
"""Without a box, only this much of the end of a completion is searched: the search is quadratic in some texts."""

_BOX = re.compile(r"\\f?boxed\s*\{")
_EQUALS = re.compile(r"^(?:\\[,;:! ]|[~\s])*(?:(?:=|≈|\\approx(?![a-zA-Z]))\s*)?")
_END = re.compile(r"(?:\\(?:[,;:! ]|$)|[.,;\s~]){1,20}$")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[a-zA-Z]\s*=)*")
_MARKED_LINE = re.compile(r"####\s*(?![0-9]+[.):]\s)([-+$\\.0-9].*)")  # `#### 1. Plan` is a heading


def answer_section(completion: str) -> str:
    """The text after the last `</think>`, or the content of the last <answer> element in it.

    An <answer> element that is not closed extends to the end if no other one is closed.
    """
    text = completion.rpartition("</think>")[2]
    end = text.rfind("</answer>") if "</answer>" in text else len(text)
    start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") : end] if start >= 0 else text


def final_expression(section: str) -> str:
    """The last boxes of `section`; if there is no box, the expression that its prose states, put into a box.

    Text that math-verify has to search itself is returned as it is. For prose that states no value the result is empty.
    """
    if contents := _last_boxes(section):
        return ", ".join(f"\\boxed{{{expression_of(content)}}}" for content in contents)
    text = normalized(section[-MAX_TEXT_CHARS:])
    stated = stated_expression(text)
    if stated is None:
        return text
    return f"\\boxed{{{stated}}}" if stated else ""


def stated_text(section: str) -> str:
    """The content of the last boxes, or the words that state the answer; not yet read as an expression."""
    return ", ".join(_last_boxes(section)) or statement(normalized(section[-MAX_TEXT_CHARS:]))


def expression_of(answer: str) -> str:
    """The expression of a box's content or of a reference: without its unit, a leading equals sign, a final period."""
    content = _EQUALS.sub("", _END.sub("", normalized(answer)))
    return number_with_unit(content) or content


def _last_boxes(section: str) -> list[str]:
    """The contents of the last box, and of the boxes joined to it by a comma, `and` or `or`."""
    boxes = box_contents(section)
    first = len(boxes) - 1
    while first > 0 and _BETWEEN_BOXES.fullmatch(section, boxes[first - 1][1] + 1, boxes[first][0]):
        first -= 1
    return [content for _, _, content in boxes[max(first, 0) :]]


def marked_answer(text: str) -> str | None:
    """The text after the mark `####` of GSM8K in the last line of `text`; None if the line has no mark.

    A Markdown heading of the same level is a mark only if it begins with the answer.
    """
    marked = _MARKED_LINE.fullmatch(text.rstrip().rpartition("\n")[2].strip())
    return marked[1] if marked else None


def box_contents(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each outermost \\boxed{...} in `text`; one that is not closed extends to the end."""
    boxes, position = [], 0
    while box := _BOX.search(text, position):
        position = closing_brace(text, box.end())
        boxes.append((box.start(), position, text[box.end() : position].strip()))
    return boxes


def closing_brace(text: str, start: int) -> int:
    """The index of the closing brace of a brace opened before `start`, or the length of `text`."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)
