"""`meshrl init`: a folder with everything that a first run on one's own rows needs, fitted to them and to a model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshrl.config.data import DataConfig
from meshrl.core.device import device_count, device_type
from meshrl.core.errors import ConfigError, DataError
from meshrl.core.files import is_there, output_errors, replacing, write_text
from meshrl.core.lookup import did_you_mean
from meshrl.core.types import Prompt
from meshrl.data.built_in_templates import BUILT_IN
from meshrl.data.chat import CHATML_TOKENS, Message, load_tokenizer, render, sft_row, stop_token_ids
from meshrl.data.datasets import PromptMaker, answer_text, is_held_out, listed, make_all
from meshrl.data.files import as_data_error
from meshrl.data.tables import CsvTable, RawRow, Table, column_names, open_table
from meshrl.model.limits import limits_of, text_config
from meshrl.run.subject import find_subject
from meshrl.tools.page.document import package_text

MAX_READ = 5000  # rows of a file that are read
MAX_LABELS, ROWS_PER_LABEL = 20, 5  # with fewer rows for each different answer, they are no labels
LEARNING_RATES = (  # hidden size up to, of RL, of SFT
    (128, "1e-3", "1e-3"),
    (512, "1e-4", "1e-3"),
    (1024, "1e-5", "1e-4"),
    (1 << 30, "1e-6", "1e-5"),
)
SMALL_WIDTH = 512  # models of up to this hidden size follow no instruction
FEW_ROWS, FEW = 50, "these are few rows: what a model learns from them, and its score, are mostly chance"
SFT_ROWS_PER_STEP, MIN_SFT_STEPS, MAX_SFT_STEPS = 16, 30, 200


class DataFile(NamedTuple):
    """Rows of a question and its answer: anything that data.path accepts, the columns, subset and split of a hub id."""

    path: str
    prompt: str = "question"
    answer: str = "answer"
    subset: str | None = None
    split: str | None = None


class Form(NamedTuple):
    """Of the rows' answers. text: for the user. kind: of the reward. score: its code. system: how to answer, for the
    model. max_new_tokens: of an answer, at least."""

    text: str
    kind: str
    score: str
    system: str | None
    max_new_tokens: int


def form_of(answers: Sequence[str]) -> Form:
    """The form of these answers: numbers, mathematics, a few labels, or texts."""
    own = "my_reward:score"
    if all(re.fullmatch(r"[-+$€£\s]*\d[\d,]*(\.\d+)?\s*%?", answer) for answer in answers):
        return Form(
            "numbers; the last number of an answer counts", own, template("number.txt"), "End with the number.", 128
        )
    if 2 * sum("####" in answer or "\\" in answer for answer in answers) > len(answers):
        return Form("mathematics, for the built-in reward math_answer", "math_answer", "", None, 256)
    counts, spelled = Counter(answer.lower() for answer in answers), {answer.lower(): answer for answer in answers}
    if len(counts) > MAX_LABELS or ROWS_PER_LABEL * len(counts) > len(answers):
        return Form("texts, whose words are compared (F1)", own, template("text.txt"), None, 32)
    labels = [spelled[label] for label, _ in counts.most_common()]
    shares = ", ".join(f"{spelled[label]} {num / len(answers):.0%}" for label, num in counts.most_common())
    system = f"Answer with one of these labels and nothing else: {', '.join(labels)}"
    return Form(f"{len(labels)} labels: {shares}", own, template("label.txt", labels=_quoted(labels)), system, 16)


def template(name: str, /, **values: Any) -> str:
    """A text of init_files, with these values if there are any."""
    text = package_text("meshrl.tools", f"init_files/{name}")
    return text.format(**values) if values else text


def init(folder: Path, model: str, data: DataFile) -> str:
    """Write configs, a reward function and a chat template for these rows and for `model`, a model's folder, a hub id
    or a run's folder, into `folder`, which must be new. Returns what was found and what to do next, for a terminal.

    Raises: ConfigError and DataError for a model or rows with which a run could not start.
    """
    subject = find_subject(model)
    if subject.state is not None:
        raise ConfigError(f"{subject.text} has no model yet; write it by: meshrl convert {subject.state} OUT")
    path = str(subject.model)
    chat, origin = _chat_template(path)
    tokenizer = load_tokenizer(path, chat)
    tokenizer.model_max_length = 1 << 30  # it would warn of rows that are too long
    values, example, lines = _facts(data, path, tokenizer)
    values |= _facts_of_model(path) | {"template": origin, "name": _quoted(f"{folder.name}-sft")}
    files = {"config.yaml": "config.yaml", "my_reward.py": "my_reward.txt", "sft.yaml": "sft.yaml"}
    files = {name: template(text, **values) for name, text in files.items()} | {"chat_template.jinja": chat}
    try:
        sft_row(tokenizer, example, stop_token_ids(tokenizer, path))
    except DataError as error:
        del files["sft.yaml"]
        lines.append(f"there is no sft.yaml, because {error}")
    with output_errors(folder, "Give another folder"), replacing(folder) as aside:
        aside.mkdir(parents=True)
        for name, text in files.items():
            write_text(aside / name, text)
    lines.append(f"wrote {folder}: {', '.join(files)}")
    return "\n".join([*lines, *_commands(folder, "sft.yaml" in files)])


def _commands(folder: Path, has_sft: bool) -> Iterator[str]:
    """What to do next."""
    train, run = f"meshrl train {folder}/config.yaml", f"runs/{folder.name}"
    yield f"check it:  {train} --explain"
    if has_sft:
        yield f"warm up:   meshrl sft {folder}/sft.yaml   (small and base models need it: it teaches how to answer)"
    yield f"train:     {train} run.name={folder.name}" + f" model.path={run}-sft" * has_sft
    yield f"look:      meshrl view {run} --eval   meshrl report {run}   meshrl eval {run}"


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _chat_template(path: str) -> tuple[str, str]:
    """The chat template for a model, and where it comes from."""
    tokenizer = load_tokenizer(path)
    own = tokenizer.chat_template
    if own := own.get("default") if isinstance(own, dict) else own:
        return own, "the tokenizer's own"
    if set(CHATML_TOKENS) <= set(tokenizer.get_vocab()):
        return BUILT_IN["chatml"], "chatml, because the tokenizer has none but its tokens"
    return template("plain_template.jinja"), "the bare text, the tokenizer has none"


def _facts_of_model(path: str) -> dict[str, Any]:
    """The values in the configs that follow from the model and this machine."""
    on_cpu, width = device_type() == "cpu", text_config(path).hidden_size
    lr, sft_lr = next((own for most, *own in LEARNING_RATES if width <= most))
    return {
        "model": _quoted(str(Path(path).resolve()) if Path(path).is_dir() else path),
        "dtype": "float32" if on_cpu else "bfloat16",
        "ranks": 1 if on_cpu else device_count(),
        "lr": lr,
        "sft_lr": sft_lr,
    }


def _facts(data: DataFile, model: str, tokenizer: Any) -> tuple[dict[str, Any], list[Message], list[str]]:
    """The values in the configs that follow from the rows; a conversation with its answer; lines for the terminal."""
    table = open_table(data.path, "auto", data.subset, data.split)
    _require_columns(table, data)
    context, vocab_size = limits_of(model, None)
    bad, texts = list[str](), dict[str, str]()
    cfg = DataConfig(prompt=data.prompt, answer=data.answer, bad_rows="leave_out")
    make = PromptMaker(cfg, tokenizer, vocab_size=vocab_size, bad=bad)

    def checked(raw: RawRow) -> Prompt:
        prompt = make(raw, 0)
        with as_data_error(f"{raw.where}: "):
            texts[prompt.id] = answer_text(prompt.answer, data.answer)
        return prompt

    prompts = make_all(table.rows(0, MAX_READ), checked, bad)
    answers = [texts[prompt.id] for prompt in prompts]
    if len({answer.lower() for answer in answers}) < 2:
        same = f"{data.path}: all rows have the answer {answers[0]!r} in column {data.answer!r}"
        raise ConfigError(f"{same}, so there is nothing to learn; name another column by --answer")
    fraction, num_train = _split(data.path, prompts)
    form, question = form_of(answers), prompts[0].messages or []
    follows = text_config(model).hidden_size > SMALL_WIDTH
    messages = _with_system(tokenizer, form.system, question) if follows else question
    more_tokens = len(render(tokenizer, messages)) - len(render(tokenizer, question))
    lengths = np.array([0 if prompt.ids is None else len(prompt.ids) for prompt in prompts]) + more_tokens
    of_answers = np.array([len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in answers])
    max_prompt_tokens, max_new_tokens = _limits(lengths, of_answers, form.max_new_tokens, context, model)
    path = str(Path(data.path).resolve()) if is_there(Path(data.path)) else data.path
    system = form.system if len(messages) > len(question) else None
    keys = {**data._asdict(), "path": path, "system": system, "eval_fraction": fraction, "bad_rows": "leave_out"}
    num_repeated = len(prompts) - len({str(prompt.messages) for prompt in prompts})
    num_long = int((lengths > max_prompt_tokens).sum())
    separated = f", with values separated by {table.delimiter!r}" if isinstance(table, CsvTable) else ""
    of_first = f" of the first {MAX_READ}" if table.num_rows > MAX_READ else ""
    lines = [
        f"{data.path}: {len(prompts)} usable rows{of_first}{separated}",
        *([f"left out {len(bad)} more that can't be used:{listed(bad)}"] if bad else []),
        f"answers: {form.text}",
        f"tokens: prompts {_spread(lengths)}, answers {_spread(of_answers)}",
        *([f"{num_long} of the prompts are longer than {max_prompt_tokens}: runs leave them out"] if num_long else []),
        *([f"rows whose question is that of an earlier row: {num_repeated}"] if num_repeated else []),
        f"{'of these, ' * bool(of_first)}{num_train} rows to train on, {len(prompts) - num_train} held out "
        "(data.eval_fraction)",
        *([FEW] if len(prompts) < FEW_ROWS else []),
    ]
    values = {
        "rows": "".join(f"  {key}: {_quoted(value)}\n" for key, value in keys.items() if value is not None),
        **form._asdict(),
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "max_row_tokens": max_prompt_tokens + max_new_tokens,
        "rows_per_step": SFT_ROWS_PER_STEP,
        "num_steps": min(MAX_SFT_STEPS, max(MIN_SFT_STEPS, num_train // SFT_ROWS_PER_STEP)),
    }
    return values, [*messages, {"role": "assistant", "content": answers[0]}], lines


def _with_system(tokenizer: Any, system: str | None, question: list[Message]) -> list[Message]:
    """The messages, after a system message if the chat template accepts it and the tokenizer can write it."""
    messages = [{"role": "system", "content": system}, *question]
    try:
        is_written = system is not None and system in tokenizer.decode(render(tokenizer, messages).tolist())
    except DataError:
        return question
    return messages if is_written else question


def _require_columns(table: Table, data: DataFile) -> None:
    first = next((row for row in table.rows() if not row.fault), None) or next(iter(table.rows()), None)
    if first is None:
        raise ConfigError(f"{data.path} has no rows")
    first.require_read()
    names = column_names(first.data)
    for option, name in (("--prompt", data.prompt), ("--answer", data.answer)):
        if name not in names:
            near = did_you_mean(name, names) or ";"
            raise ConfigError(
                f"{data.path} has no column {name!r}; its columns are {', '.join(names)}{near} name one by {option}"
            )


def _spread(sizes: np.ndarray) -> str:
    return f"{np.median(sizes):.0f} (median) to {sizes.max()}"


def _limits(prompts: np.ndarray, answers: np.ndarray, least: int, context: int, model: str) -> tuple[int, int]:
    """(max_prompt_tokens, max_new_tokens) for these lengths in tokens, int[N]: room for the longest, or for 99 of 100
    where few are much longer. least: of max_new_tokens, if the model's context has room for it."""
    of_prompt, of_answer = (
        -(-(longest if (longest := int(sizes.max())) <= 2 * (most := int(np.percentile(sizes, 99))) else most) // 8) * 8
        for sizes in (prompts, answers)
    )
    new = min(max(least, of_answer), max(of_answer, context - of_prompt))
    of_prompt = min(of_prompt, context - new)
    if of_prompt < np.median(prompts):
        raise ConfigError(
            f"{model} reads {context} tokens (max_position_embeddings); the prompts have {_spread(prompts)}, "
            f"the answers {_spread(answers)}. Give shorter rows, or another model: docs/data.md shows how to make one"
        )
    return of_prompt, new


def _split(path: str, prompts: Sequence[Prompt]) -> tuple[float, int]:
    """(data.eval_fraction, number of rows to train on): a tenth of many rows, more of few."""
    for fraction in (0.1 if len(prompts) >= 500 else 0.2, 0.3, 0.5):
        num_train = sum(not is_held_out(prompt.messages or [], fraction) for prompt in prompts)
        if 0 < num_train < len(prompts):
            return fraction, num_train
    text = f"{path} has {len(prompts)} usable rows, too few different ones to train on some and evaluate on others"
    raise ConfigError(f"{text}. Give at least {FEW_ROWS}")
