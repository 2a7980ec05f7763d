from typing import Any, Literal

from meshrl.config.base import Slice, field


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
