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
        False, "read rows as they are drawn, for sets larger than memory; a bad row then shows when it is met"
    )
    shuffle_buffer_rows: int = field(8192, "rows shuffled among each other, and held, when streaming", ge=1)
    eval_limit: int | None = field(None, "rows of eval_path to use, from its start; null = all", ge=1)


class RewardTerm(Slice):
    kind: str = field(..., "a known reward such as math_answer, or a function as package.module:name")
    weight: float = field(1.0, "factor in the weighted sum; below 0 is a penalty")
    args: dict[str, Any] = field({}, "keyword arguments of the function")


class RewardConfig(Slice):
    terms: dict[str, RewardTerm] = field(
        {"answer": RewardTerm(kind="math_answer")}, "the terms by name; their weighted sum is the reward"
    )
    num_workers: int = field(1, "processes that grade; they can be killed and hold no model", ge=1)
    timeout_s: float = field(10.0, "seconds one grading may take before its worker is killed", gt=0)
    max_memory_bytes: int = field(2 << 30, "address space of one worker, in bytes", ge=64 << 20)
    max_failure_fraction: float = field(0.2, "share of a step's gradings that may fail before the run ends", ge=0, le=1)


class AgentConfig(Slice):
    kind: str = field("single_turn", "a known agent, or a class as package.module:name")
    args: dict[str, Any] = field({}, "keyword arguments of the agent")


class LoopConfig(Slice):
    kind: Literal["colocated", "one_step_off", "fully_async"] = field("colocated", "the schedule")
    num_steps: int = field(..., "steps of sampling and training", ge=1)
    prompts_per_step: int = field(32, "prompts sampled each step", ge=1)
    samples_per_prompt: int = field(8, "answers to each prompt, the group; 8 or more give a steady baseline", ge=1)
    max_staleness: int = field(0, "weight versions that a sample may be behind", ge=0)
    eval_every_steps: int = field(0, "steps between evaluations; 0 = only before and after training", ge=0)
    eval_samples: int = field(1, "answers to each held-out prompt, k of mean@k and pass@k; 1 = one greedy answer", ge=1)
    save_best: bool = field(
        True, "save the model whenever an evaluation beats all before it by eval/mean_at_k; the one before goes"
    )
    save_every_steps: int = field(
        0, "steps between checkpoints, each with the model beside it; 0 = only at the end and when interrupted", ge=0
    )


class Deadlines(Slice):
    start: float | None = field(None, "the ranks' processes come up and import torch", gt=0)
    load: float | None = field(None, "the ranks meet and load models, or a checkpoint", gt=0)
    rollout: float | None = field(None, "one answer of a sampler, the time it waits for its turn included", gt=0)
    reward: float | None = field(None, "the gradings of one step; each has reward.timeout_s, too", gt=0)
    annotate: float | None = field(None, "one pass of the reference, or of the policy for old logprobs", gt=0)
    train: float | None = field(None, "forward and backward of one optimizer step", gt=0)
    optim: float | None = field(None, "the optimizer's own step", gt=0)
    sync: float | None = field(None, "each stage of sending weights: begin, a bucket, commit", gt=0)
    checkpoint: float | None = field(None, "copying a training state to host memory, or writing it out", gt=0)
    export: float | None = field(None, "writing the model", gt=0)
    eval: float | None = field(None, "one answer to a held-out prompt", gt=0)
    report: float | None = field(None, "asking the ranks for a step's memory use", gt=0)
    end: float | None = field(None, "the ranks free what they hold and end", gt=0)


class ClusterConfig(Slice):
    executor: Literal["inline", "processes", "ray"] = field(
        "processes",
        "processes: one for each rank, on this machine or wherever torchrun starts it; ray: on the machines of a Ray "
        "cluster; inline: all in this very process, for a debugger",
    )
    num_train_ranks: int = field(1, "FSDP2 ranks, one for each device (or share of the CPU)", ge=1)
    num_rollout_ranks: int = field(0, "ranks that only sample; 0 = the train ranks sample too", ge=0)
    nodes: int = field(
        1, "machines that executor ray takes, with equally many ranks each; torchrun says by itself how many", ge=1
    )
    address: str | None = field(
        None,
        "Ray cluster to run on, as host:port; null = RAY_ADDRESS, else the one that runs on this machine, else as "
        "local; local = one for this run alone",
    )
    timeout_s: float = field(
        600.0, "seconds that a phase may take, see deadlines; a miss ends the run and names rank and phase", gt=0
    )
    deadlines: Deadlines = field(Deadlines(), "seconds for single phases; null = cluster.timeout_s")
    max_restarts: int = field(
        3,
        "how often a run mends dead or silent ranks: one that only samples is replaced, and with lost train ranks it "
        "starts again from its last checkpoint, each so many times; the next failure ends it",
        ge=0,
    )

    def deadline_s(self, phase: str) -> float:
        """Seconds that a phase may take; it is the name of a field of deadlines."""
        given: float | None = self.deadlines.model_dump()[phase]
        return self.timeout_s if given is None else given


class RunSection(Slice):
    name: str = field("auto", "folder below run.folder; auto = the config file's name and the time")
    folder: str = field("runs", "where runs are written")
    seed: int = field(0, "decides data order, sampling and everything else random", ge=0)
    resume: str = field(
        "never",
        "never: the run starts anew, and refuses a folder that has checkpoints; auto: it continues from its newest "
        "checkpoint, if there is one; or the folder of a checkpoint, of this run or of another",
    )
    keep_checkpoints: int = field(
        2, "newest training states that stay on disk; models saved beside older ones stay, too", ge=1
    )


class SftConfig(Slice):
    path: str = field(..., "JSONL file; each row has a `messages` list whose assistant turns are trained")
    messages: str = field("messages", "column with the chat messages")
    chat_template: str | None = field(None, "as data.chat_template")
    chat_template_kwargs: dict[str, Any] = field({}, "as data.chat_template_kwargs")
    rows_per_step: int = field(64, "rows in one optimizer step", ge=1)
    num_steps: int = field(..., "optimizer steps", ge=1)
    save_every_steps: int = field(0, "steps between checkpoints; 0 = only at the end and when interrupted", ge=0)
    max_row_tokens: int = field(1024, "longer rows are left out, and counted", ge=1)
    shuffle: bool = field(True, "a new order in each pass, by run.seed")
