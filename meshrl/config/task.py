from typing import Any, Literal

from meshrl.config.base import Slice, field


class DataConfig(Slice):
    path: str = field(..., "JSONL file of training rows; relative to the config file, then to the working folder")
    eval_path: str | None = field(
        None, "JSONL file of held-out rows; needed by loop.eval_every_steps and `meshrl eval`"
    )
    prompt: str = field("question", "column with the question text, or with a list of chat messages")
    answer: str | None = field("answer", "column with the ground truth handed to the reward")
    system: str | None = field(None, "system message put before each question")
    max_prompt_tokens: int = field(1024, "longer prompts are filtered out, with a count", ge=1)
    shuffle: bool = field(True, "new order each epoch, by run.seed")
    eval_limit: int | None = field(None, "first rows of eval_path to use; all by default", ge=1)


class RewardTerm(Slice):
    kind: str = field(
        ..., "a name of meshrl/reward's table (math_answer, ...) or a dotted path package.module:function"
    )
    weight: float = field(1.0, "factor in the weighted sum")
    args: dict[str, Any] = field({}, "keyword arguments of the function")


class RewardConfig(Slice):
    terms: dict[str, RewardTerm] = field(
        {"answer": RewardTerm(kind="math_answer")}, "name -> term; their weighted sum is the reward"
    )
    num_workers: int = field(1, "processes that grade; they import no torch and can be killed", ge=1)
    timeout_s: float = field(10.0, "seconds one grading may take before its worker is killed", gt=0)
    max_memory_bytes: int = field(2 << 30, "address space of one worker", ge=64 << 20)
    max_failure_fraction: float = field(0.2, "share of failed gradings in a step above which the run ends", ge=0, le=1)


class AgentConfig(Slice):
    kind: str = field("single_turn", "a name of meshrl/agent's table or a dotted path package.module:class")
    args: dict[str, Any] = field({}, "keyword arguments of the agent")


class LoopConfig(Slice):
    kind: Literal["colocated", "one_step_off", "fully_async"] = field("colocated", "the schedule")
    num_steps: int = field(..., "rollout steps to train", ge=1)
    prompts_per_step: int = field(32, "prompts sampled each step", ge=1)
    samples_per_prompt: int = field(8, "group size: attempts at each prompt", ge=1)
    max_staleness: int = field(0, "versions a sample may be behind; 0 is colocated", ge=0)
    eval_every_steps: int = field(0, "0 = only before and after training, if data.eval_path is given", ge=0)
    eval_samples: int = field(1, "k of mean@k and pass@k; 1 = one greedy answer", ge=1)
    save_every_steps: int = field(0, "0 = only at the end", ge=0)


class ClusterConfig(Slice):
    executor: Literal["inline", "processes", "ray"] = field("processes", "inline: this very process, for a debugger")
    num_train_ranks: int = field(1, "FSDP2 ranks, one a device", ge=1)
    num_rollout_ranks: int = field(0, "sampler processes of their own; 0 = colocated in the train ranks", ge=0)
    nodes: int = field(1, "machines", ge=1)
    timeout_s: float = field(
        600.0, "deadline of one command to the ranks; a miss ends the run and names the rank", gt=0
    )


class RunSection(Slice):
    name: str = field("auto", "folder name under run.folder; auto = config name and time")
    folder: str = field("runs", "where runs are written")
    seed: int = field(0, "of data order, sampling and everything else random", ge=0)
    resume: Literal["auto", "never"] = field("auto", "auto continues from the newest checkpoint of the same run name")


class SftConfig(Slice):
    path: str = field(..., "JSONL file; each row has a `messages` list whose assistant turns are trained")
    messages: str = field("messages", "column with the chat messages")
    rows_per_step: int = field(64, "rows in one optimizer step", ge=1)
    num_steps: int = field(..., "optimizer steps", ge=1)
    max_row_tokens: int = field(1024, "longer rows are filtered out, with a count", ge=1)
    shuffle: bool = field(True, "new order each epoch, by run.seed")
