"""The answers of one step or evaluation, with the names by which all views of a run show and accept them, and as
text for a terminal, by `meshrl view RUN --step N` and `--eval`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from meshrl.config.reward import has_passed
from meshrl.core.errors import Failure, Graded, MeshrlError
from meshrl.core.terminal import counted, printable
from meshrl.core.types import Media, Prompt
from meshrl.monitor.rollout_log import LoggedTrajectory, answer_files, read_rollouts
from meshrl.tools.report.folder import criterion_of, judged_score, read_settings, text_with_images
from meshrl.tools.runs import require_run


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one step or evaluation, each group at one prompt. title: for a user. groups: by STEP/GROUP, the
    group by its number in the file from 1; an answer's name is that and its index from 0, such as 12/3/0, or
    eval_12/3/0 in the evaluation after step 12. num_groups: of the file. error: what can't be read, "" = none."""

    title: str
    groups: dict[str, list[LoggedTrajectory]]
    num_groups: int
    error: str


def require_rollouts(run: Path) -> None:
    """Raises: MeshrlError with the reason when this is no folder of a run with rollouts."""
    if answer_files(run, "step") or answer_files(run, "eval"):
        return
    require_run(run)
    if any(setting.key == "sft.path" for setting in read_settings(run / "config.yaml")):
        raise MeshrlError(f"{run} is a run of supervised fine-tuning, which samples no answers, so it has no rollouts")
    raise MeshrlError(f"{run} has no rollouts: no step has ended yet, or monitor.rollout_log_every_steps is 0")


def step_name(kind: str, step: int) -> str:
    """Of a file of rollouts: 12, or eval_12 for the evaluation after step 12."""
    return f"eval_{step}" if kind == "eval" else str(step)


def read_answers(run: Path, kind: str, step: int, wrong: bool = False) -> Answers:
    """kind: "step" or "eval". step: -1 = the last. wrong: only answers whose score is below loop.eval_pass_score."""
    require_rollouts(run)
    files = answer_files(run, kind)
    title, key = "rollouts of step", "monitor.rollout_log_every_steps"
    if kind == "eval":
        title, key = "evaluation after step", "loop.eval_every_steps"
    number = max(files, default=-1) if step == -1 else step
    if number not in files:
        steps = shorten(", ".join(map(str, files)), 200, placeholder=" ...") or "none"
        raise MeshrlError(f"{run} has no {title} {step} ({key}); there are: {steps}")
    term, pass_score = criterion_of(read_settings(run / "config.yaml"))
    names: dict[str, str] = {}
    groups: dict[str, list[LoggedTrajectory]] = {}
    notes: list[str] = []
    for logged in read_rollouts(files[number], notes):
        name = names.setdefault(logged.trajectory.group_id, f"{step_name(kind, number)}/{len(names) + 1}")
        answer = logged.trajectory
        if not (wrong and has_passed(judged_score(answer, term), answer.rewards, pass_score)):
            groups.setdefault(name, []).append(logged)
    return Answers(f"{run}, {title} {number}{', wrong answers only' * wrong}", groups, len(names), "".join(notes))


_ANY_WIDTH = 1 << 20  # of lines in a pipe or a file


def one_line_each(answers: Answers) -> Iterator[str]:
    """The text of each answer as one line, so that `grep`, `sort | uniq -c` and `wc -l` count answers. Newlines are the
    two characters \\n."""
    for group in answers.groups.values():
        for logged in group:
            yield printable(_sampled_text(logged).replace("\n", "\\n"))


def _sampled_text(logged: LoggedTrajectory) -> str:
    """The decoded text, also of an agent that left no messages."""
    try:
        return logged.trajectory.text
    except MeshrlError:
        return "\n".join(logged.texts)


def pages_of(answers: Answers) -> Iterator[str]:
    """A text for the head, and one for each group. On a terminal, lines are wrapped, and coloured unless NO_COLOR is
    set."""
    rewards = [logged.trajectory.reward for group in answers.groups.values() for logged in group]
    graded = [reward for reward in rewards if reward is not None]
    mean = f", mean reward {sum(graded) / len(graded):.4g}" if graded else ""
    of = f"{len(answers.groups)} of " if len(answers.groups) < answers.num_groups else ""
    counts = f"{of}{counted(answers.num_groups, 'prompt')}, {counted(len(rewards), 'answer')}"
    yield _drawn([Text(printable(f"{answers.title}: {counts}{mean}"), "bold")])
    for name, group in answers.groups.items():
        question = _question_parts(group[0].trajectory.prompt, f" {name.rpartition('/')[2]} of {answers.num_groups}")
        yield _drawn([Text(), *question, *(part for logged in group for part in _answer_parts(name, logged))])
    if answers.error:
        yield _drawn([Text(printable(answers.error), "yellow")])


def _question_parts(prompt: Prompt, number: str = "") -> Iterator[Any]:
    """The head of a group, the messages of its prompt, and the expected answer."""
    yield Text(printable(f"━━━ prompt{number}: {prompt.id}"), "bold cyan")
    for message in (*(prompt.messages or ()), {"role": "expected answer", "content": prompt.answer}):
        yield from _message_parts(message, prompt.media)
    for media in prompt.media.values():
        place = f"rollouts/images/{media.digest}.jpg" if media.thumbnail else "no thumbnail"
        line = f"  {media.kind} {media.source}: {counted(media.num_tokens, 'token')}, {place}"
        yield Text(printable(line), "dim")


def _answer_parts(group: str, logged: LoggedTrajectory) -> Iterator[Any]:
    """The head of an answer with its name and reward, and the messages of its turns. group: key of `Answers.groups`."""
    trajectory = logged.trajectory
    reward, tokens = trajectory.reward, counted(sum(len(turn.output_ids) for turn in trajectory.turns), "token")
    style = "yellow" if reward is None else "green" if reward > 0 else "red"
    shown = trajectory.rewards | {f"metric {name}": number for name, number in trajectory.metrics.items()}
    terms = (f"{n} {_graded(result)}" for n, result in shown.items())
    by_term = f" ({', '.join(terms)})" if len(shown) > 1 else ""  # such as (correct 1, form 0.1)
    text = f"reward {'none' if reward is None else f'{reward:.4g}'}{by_term}"
    head = f"── answer {group}/{trajectory.index}: {text}, {trajectory.status}, {tokens}"
    yield Text(printable(head), style)
    for failure in (trajectory.failure, *trajectory.rewards.values()):
        if isinstance(failure, Failure):
            yield Text(printable(f"  {failure.kind}: {failure.message}"), "yellow")
    for number, (turn, sampled) in enumerate(zip(trajectory.turns, logged.texts)):
        if len(trajectory.turns) > 1:
            branch = f", continues turn {turn.parent}" if 0 <= turn.parent < number - 1 else ""
            begins = ", a new conversation" if turn.parent < 0 < number else ""
            took = time_text(asdict(turn.times))
            yield Text(
                f"  turn {number}{branch}{begins}{took and f': {took}'}{turn.source and f', {turn.source}'}", "dim"
            )
        for message in turn.messages or [{"role": "assistant", "content": sampled}]:
            yield from _message_parts(message, trajectory.prompt.media, len(trajectory.turns) > 1)


def time_text(times: Mapping[str, Any]) -> str:
    """Where the time of a turn went, by the fields of Times; "" if it is not known."""
    stages = {name: float(times.get(f"{name}_s") or 0.0) for name in ("queue", "prefill", "decode")}
    total = max(float(times.get("total_s") or 0.0), sum(stages.values()))
    if not total:
        return ""
    cached = f", {times['cached_tokens']} context tokens from the cache" if times.get("cached_tokens") else ""
    tools = f", then {times['tool_s']:.2f} s of tools" if times.get("tool_s") else ""
    return f"{total:.2f} s ({', '.join(f'{name} {seconds:.2f}' for name, seconds in stages.items())}){cached}{tools}"


def _graded(result: Graded) -> str:
    return "failed" if isinstance(result, Failure) else "does not apply" if result is None else f"{result:.4g}"


def _message_parts(message: dict[str, Any], media: Mapping[str, Media], with_role: bool = True) -> Iterator[Any]:
    """The role and the indented content of a message, with the calls of tools that it has as fields."""
    if with_role:
        yield Text(printable(f"  {message.get('role')}:"), "dim")
    for content in (message.get("content"), *(message.get("tool_calls") or ())):
        if content is not None:
            text = Text(printable(text_with_images(content, media)).expandtabs(4))
            yield Padding(text, (0, 0, 0, 4), expand=False)


def _drawn(parts: Sequence[Any]) -> str:
    """The parts as they are written to the standard output."""
    is_terminal = sys.stdout.isatty()
    file = io.StringIO()
    Console(file=file, force_terminal=is_terminal, width=None if is_terminal else _ANY_WIDTH).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
