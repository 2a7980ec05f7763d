from typing import Any, Literal

from meshrl.config.base import Slice, field


class DataConfig(Slice):
    path: str = field(..., "JSONL file of training rows, beside the config file or in the working folder")
    eval_path: str | None = field(None, "JSONL file of held-out rows; null = nothing is evaluated")
    prompt: str = field("question", "column with the question text, or with a list of chat messages")
    answer: str | None = field("answer", "column with the ground truth that rewards get; null = there is none")
    system: str | None = field(None, "system message put before each question")
    max_prompt_tokens: int = field(1024, "longer prompts are left out, and counted", ge=1)
    shuffle: bool = field(True, "a new order in each pass, by run.seed")
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
    save_every_steps: int = field(0, "steps between saved models; 0 = only at the end", ge=0)


class ClusterConfig(Slice):
    executor: Literal["inline", "processes", "ray"] = field(
        "processes", "processes: one for each rank; inline: all in this very process, for a debugger"
    )
    num_train_ranks: int = field(1, "FSDP2 ranks, one for each device (or share of the CPU)", ge=1)
    num_rollout_ranks: int = field(0, "ranks that only sample; 0 = the train ranks sample too", ge=0)
    nodes: int = field(1, "machines", ge=1)
    timeout_s: float = field(
        600.0, "seconds one command to the ranks may take; a miss ends the run and names the rank", gt=0
    )


class RunSection(Slice):
    name: str = field("auto", "folder below run.folder; auto = the config file's name and the time")
    folder: str = field("runs", "where runs are written")
    seed: int = field(0, "decides data order, sampling and everything else random", ge=0)
    resume: Literal["auto", "never"] = field(
        "never", "never: the run starts anew; auto: it continues from its newest checkpoint"
    )


class SftConfig(Slice):
    path: str = field(..., "JSONL file; each row has a `messages` list whose assistant turns are trained")
    messages: str = field("messages", "column with the chat messages")
    rows_per_step: int = field(64, "rows in one optimizer step", ge=1)
    num_steps: int = field(..., "optimizer steps", ge=1)
    max_row_tokens: int = field(1024, "longer rows are left out, and counted", ge=1)
    shuffle: bool = field(True, "a new order in each pass, by run.seed")
