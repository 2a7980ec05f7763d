"""The keys of data.*, and the checks that need no file; meshrl.data.check has those of the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from meshrl.config.base import EVALUATED, Slice, Unless
from meshrl.config.case import Case, Problem
from meshrl.config.kinds import needs_answer
from meshrl.config.rollout import EvalSamplingConfig
from meshrl.core.lookup import DOTTED_PATH, can_be_imported, did_you_mean

Format = Literal["auto", "jsonl", "json", "csv", "parquet", "datasets"]


MEDIA_CACHE_BYTES = 1 << 30


class NamedRows(Slice):
    path: str
    """rows of the data set NAME, in any form that data.path accepts"""
    format: Format = "auto"
    """as data.format"""
    subset: str | None = None
    """as data.subset"""
    split: str | None = None
    """as data.split"""
    prompt: str | None = None
    """column with the question; null = data.prompt"""
    answer: str | None = None
    """column with the ground truth; null = data.answer"""
    map: str | None = None
    """function that makes a prompt of each row; null = data.map"""


class DataSource(NamedRows):
    weight: float = Field(1.0, gt=0)
    """share of the prompts that come from this source, relative to the other weights"""


class EvalSet(NamedRows):
    samples: int | None = Field(None, ge=1)
    """answers sampled for each prompt of this set; null = loop.eval_samples"""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """in place of rollout.eval_sampling for this set; null = the value there"""


class DataConfig(Slice):
    path: str | None = None
    """training rows: a JSONL, JSON, CSV, TSV or parquet file or a folder of JSONL or parquet files (relative to the
    config file or the working folder), a folder made by save_to_disk, or a hub id such as organisation/name"""
    sources: dict[str, DataSource] = Field({})
    """in place of path: a mixture of data sets, by name; each step has the share of every set, to within two prompts"""
    eval_path: str | None = None
    """held-out rows, in any form that path accepts; null = those of eval_fraction, or no evaluation"""
    eval_sets: dict[str, EvalSet] = Field({})
    """in place of eval_path: several held-out data sets, by name; the score of each is eval/by/NAME/mean_at_k"""
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    """in place of eval_path: share of the rows of path that are held out for evaluations and never trained on. The text
    of the user's messages decides it, so equal questions are on one side, and new rows leave the others where they are;
    null = none"""
    format: Format = "auto"
    """the format of path and eval_path; auto = by suffix, or by the files in the folder"""
    subset: str | None = None
    """configuration of a hub data set that has several, such as main of openai/gsm8k"""
    split: str | None = None
    """split of a Hugging Face data set in path; required if the data set has several"""
    eval_split: Annotated[str | None, Unless("data.eval_path", None)] = None
    """split of a Hugging Face data set in eval_path"""
    prompt: str = "question"
    """column with the question text or a list of chat messages; a.b = field b of column a"""
    answer: str | None = "answer"
    """column with the ground truth that rewards get; null = no ground truth"""
    tools: str | None = "tools"
    """column with the tools that a row describes to the model, a list or its JSON text; rows without it have the tools
    of the agent; null = the column is not read"""
    images: str | None = None
    """column with the images of a prompt, one or a list: paths below the folder of the data file, bytes, data URLs, or
    images of a Hugging Face data set; null = images, if a row has it. It needs a vision-language model"""
    media_cache_bytes: int = Field(MEDIA_CACHE_BYTES, ge=0)
    """processed images that stay in memory, in bytes; others are processed again when they are needed"""
    continue_last: bool = False
    """a prompt that ends with a message of the assistant is the beginning of the answer, which the model continues;
    rewards get only what it adds. false = such a prompt is an error"""
    map: str | None = None
    """function package.module:name in place of the columns: it gets a row and returns a dict with prompt or messages,
    optionally with answer, env, meta, tools and images"""
    system: str | None = None
    """system message put before each question"""
    chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own, as a file, as the text itself, or chatml for that format and
    chatml_tools for it with tools; it is also saved with exported models; null = the tokenizer's"""
    chat_template_kwargs: dict[str, Any] = Field({})
    """variables that the chat template gets in every rendering, such as enable_thinking: false"""
    max_prompt_tokens: int = Field(1024, ge=1)
    """limit of a prompt in tokens; longer prompts are left out and counted"""
    bad_rows: Annotated[Literal["error", "leave_out"], Unless("data.streaming", True)] = "error"
    """what happens to rows that can't be read or that have no prompt or no answer; leave_out = they are listed in the
    run's notes and left out, unless they are more than half of the rows"""
    shuffle: bool = True
    """draw the rows of each pass in a new random order, from run.seed"""
    streaming: bool = False
    """read and render each row only when it is drawn, for data sets larger than memory; an invalid row is an error only
    when it is drawn"""
    eval_limit: Annotated[int | None, EVALUATED] = Field(None, ge=1)
    """held-out rows to use, from the first one; null = all"""
    eval_by: Annotated[str | None, EVALUATED] = None
    """column of the held-out rows, such as label or level, by whose values scores are also reported, as
    eval/by/VALUE/mean_at_k; null = none"""

    @property
    def is_evaluated(self) -> bool:
        """Whether there are held-out rows."""
        return self.eval_path is not None or self.eval_fraction is not None or bool(self.eval_sets)

    def named(self, training: bool = True) -> dict[str, NamedRows]:
        """The data sets that have names, by their keys: the sources of the training, and the held-out sets."""
        sources = {f"data.sources.{name}": each for name, each in self.sources.items()} if training else {}
        return {**sources, **{f"data.eval_sets.{name}": each for name, each in self.eval_sets.items()}}


def data_problems(case: Case) -> Iterator[Problem]:
    """Problems of data.*. Those of the training rows only for training: an evaluation does not need these rows."""
    data = case.rl.data
    if case.purpose == "train":
        if data.path is not None and data.sources:
            keys, forms = ("data.path", "data.sources"), "a single set, or a mixture of sources"
            yield Problem(keys, f"give one of the two: {forms}.", void=keys, reason=f"the rows are {forms}")
        if data.path is None and not data.sources:
            yield Problem(("data.path",), "training needs rows: give a path, or a mixture as data.sources.")
    for _, key, name in (key.split(".", 2) for key in data.named()):
        if not name.isidentifier():
            text = f"the name {name!r} must be one word of letters, digits and underscores."
            yield Problem((f"data.{key}",), text)
    if data.eval_path is not None and data.eval_sets:
        keys, forms = ("data.eval_path", "data.eval_sets"), "a single held-out set, or several"
        yield Problem(keys, f"give one of the two: {forms}.", void=keys, reason=f"the held-out rows are {forms}")
    if data.eval_fraction is not None:
        why = "eval_fraction holds out rows of a single data.path, which is read at the start"
        for key in ("eval_path", "eval_sets", "sources", "streaming"):
            if getattr(data, key):
                keys = ("data.eval_fraction", f"data.{key}")
                yield Problem(keys, f"{why}: give only one of the two.", void=keys, reason=why)
        if data.path is None:
            yield Problem(("data.eval_fraction",), "there is no data.path of which rows could be held out.")
    if data.continue_last and case.rl.agent.kind == "multi_turn":
        text = "multi_turn begins a new message for each turn, so it can't continue one. Use agent.kind: single_turn."
        yield Problem(("data.continue_last", "agent.kind"), text)
    of_sources = {f"{key}.map": source.map for key, source in data.named().items()}
    for key, function in ({"data.map": data.map} | of_sources).items():
        if function is not None and not DOTTED_PATH.fullmatch(function):
            yield Problem((key,), "must be a function as package.module:name; it gets a row and returns a prompt.")
        elif function is not None and not can_be_imported(function):
            yield Problem(
                (key,),
                "no such module: neither installed, nor next to the config, nor in PYTHONPATH or the working folder.",
            )
    yield from _answers(case)


def _answers(case: Case) -> Iterator[Problem]:
    """Rewards that need an answer, where no answer column is configured. The rows that a map returns are checked when
    they are read."""
    data, rewards = case.rl.data, case.rl.reward.terms
    named = data.named()
    if data.map is None and not any(source.map for source in named.values()):
        known = ["default", *(key.rpartition(".")[2] for key in named)]
        of_keys = [(f"reward.terms.{name}.envs", env) for name, term in rewards.items() for env in term.envs or ()]
        of_keys += [(f"algo.advantage_by_env.{env}", env) for env in case.rl.algo.advantage_by_env]
        for key, env in dict.fromkeys(of_keys):
            if env not in known:
                text = f"no row has env {env!r}; there are: {', '.join(known)}{did_you_mean(env, known)}."
                yield Problem((key,), text)
    needs = {name: term for name, term in rewards.items() if needs_answer(term.kind) and term.envs is None}
    terms = {f"reward.terms.{name}.kind": term.kind for name, term in needs.items()}
    if not terms or data.answer is not None:
        return
    training = case.purpose == "train"
    unnamed = [
        f"{key}.answer"
        for key, source in data.named(training).items()
        if source.answer is None and not (source.map or data.map)
    ]
    if unnamed or (data.map is None and ((training and data.path is not None) or data.eval_path is not None)):
        yield Problem(
            ("data.answer", *unnamed, *terms),
            f"{' and '.join(sorted({*terms.values()}))} compares each completion with the answer of its row, but null "
            "names no column for it. Name the column with the ground truth, or use a reward that needs none.",
        )
