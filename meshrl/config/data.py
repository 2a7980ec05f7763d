from typing import Any, Literal

from meshrl.config.base import Slice, field

Format = Literal["auto", "jsonl", "parquet", "datasets"]


class DataSource(Slice):
    path: str = field(..., "rows of this source, in any form that data.path takes")
    weight: float = field(1.0, "its share of the prompts, against the other sources' weights", gt=0)
    format: Format = field("auto", "as data.format")
    subset: str | None = field(None, "as data.subset")
    split: str | None = field(None, "as data.split")
    prompt: str | None = field(None, "column with the question; null = data.prompt")
    answer: str | None = field(None, "column with the ground truth; null = data.answer")
    map: str | None = field(None, "function that makes its prompts; null = data.map")


class DataConfig(Slice):
    path: str | None = field(
        None,
        "training rows: a JSONL or parquet file or a folder of such shards (beside the config file or in the working "
        "folder), a folder made by save_to_disk, or a hub id as organisation/name",
    )
    sources: dict[str, DataSource] = field(
        {}, "in place of path: a mixture of sets by name; in each step every set has its share, to within one prompt"
    )
    eval_path: str | None = field(None, "held-out rows, in any form that path takes; null = nothing is evaluated")
    format: Format = field("auto", "what path and eval_path hold; auto = by suffix, or by what lies in the folder")
    subset: str | None = field(None, "configuration of a hub set that has several, as main of openai/gsm8k")
    split: str | None = field(None, "split of a Hugging Face set in path; needed where there are several")
    eval_split: str | None = field(None, "split of a Hugging Face set in eval_path")
    prompt: str = field("question", "column with the question text or a list of chat messages; a.b = b inside a")
    answer: str | None = field("answer", "column with the ground truth that rewards get; null = there is none")
    map: str | None = field(
        None,
        "function package.module:name in place of the columns: it gets a row and returns prompt or messages, and may "
        "add answer, env and meta",
    )
    system: str | None = field(None, "system message put before each question")
    chat_template: str | None = field(
        None,
        "Jinja chat template in place of the tokenizer's own, as a file or as the text itself; exported models have it "
        "too; null = the tokenizer's",
    )
    chat_template_kwargs: dict[str, Any] = field(
        {}, "variables that the chat template gets in every rendering, as enable_thinking: false"
    )
    max_prompt_tokens: int = field(1024, "longer prompts are left out, and counted", ge=1)
    shuffle: bool = field(True, "a new order in each pass, by run.seed")
    streaming: bool = field(
        False, "read and render each row when it is drawn, for sets larger than memory; a bad row is then found late"
    )
    eval_limit: int | None = field(None, "rows of eval_path to use, from its start; null = all", ge=1)
