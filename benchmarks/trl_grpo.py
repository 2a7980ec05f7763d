"""TRL's GRPOTrainer on the task of grpo_vs_trl.py. Runs in TRL's own environment: python trl_grpo.py TASK.json

TASK.json: {"task": fields of runs.TrainingTask, "settings": {...}, "steps": file to write}. Settings, for TRL only:

    micro_batch           rows of one forward and backward (per_device_train_batch_size)
    num_ranks             processes, each with its share of the threads
    continuous_batching   arguments of generate_batch, which then replaces generate (null: generate)
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from first_step import share_moved
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    task, settings = given["task"], given["settings"]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [json.loads(line) for line in Path(task["data"]).read_text(encoding="utf-8").splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in rows]
    trainer = TrainerWithMasters(
        model=task["model"],
        reward_funcs=[reward(name, term) for name, term in task["rewards"].items()],
        args=config(task, settings, Path(given["steps"]).parent),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[StepWriter(Path(given["steps"]), task)],
    )
    trainer.train()


class TrainerWithMasters(GRPOTrainer):
    """GRPOTrainer that keeps fp32 master weights with bf16=True and continuous batching.

    TRL casts the model to bfloat16 in place before it samples by continuous batching, and never casts it back. From
    then on AdamW updates bfloat16 weights, whose spacing is larger than an update of lr for most weights. Here only the
    sampling uses bfloat16 weights. Buffers are not cast, because rotary frequencies in bfloat16 change the policy.
    """

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.args.bf16 and self.use_transformers_continuous_batching):
            return super()._generate_single_turn(*args, **kwargs)
        masters = [(parameter, parameter.data) for parameter in self.model.parameters()]
        for parameter, data in masters:
            parameter.data = data.to(torch.bfloat16)
        self.args.bf16 = False  # no cast by TRL
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.args.bf16 = True
            for parameter, data in masters:
                parameter.data = data


def config(task: dict[str, Any], settings: dict[str, Any], folder: Path) -> GRPOConfig:
    """The common task as TRL's configuration."""
    optimizer, rows = task["optimizer"], task["prompts_per_step"] * task["samples_per_prompt"]
    batching = settings["continuous_batching"]
    return GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs={"dtype": "float32"},  # masters; bf16 computes in bfloat16 under autocast
        bf16=task["dtype"] == "bfloat16",
        use_cpu=True,
        ddp_backend="gloo" if settings["num_ranks"] > 1 else None,
        seed=task["seed"],
        max_steps=task["num_steps"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=rows // (settings["micro_batch"] * settings["num_ranks"]),
        num_generations=task["samples_per_prompt"],
        max_completion_length=task["max_new_tokens"],
        temperature=1.0,
        shuffle_dataset=False,
        use_transformers_continuous_batching=batching is not None,
        transformers_continuous_batching_config=batching,
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip"],
        lr_scheduler_type="constant",
        loss_type="dapo",  # the mean over all tokens of the step
        beta=0.0,
        scale_rewards="group",
        reward_weights=[term["weight"] for term in task["rewards"].values()],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def reward(name: str, term: dict[str, Any]) -> Any:
    """A term of the task with the signature of TRL's reward functions."""
    module, _, function = term["kind"].partition(":")
    grade = getattr(importlib.import_module(module), function)

    def graded(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [grade(c[0]["content"], a, **term["args"]) for c, a in zip(completions, answer, strict=True)]

    graded.__name__ = name
    return graded


class StepWriter(TrainerCallback):
    """Writes one JSON line for each step: its end time, mean reward, sampled tokens, TRL's own timings and, for a run
    of one step, `share_moved` (first_step.py)."""

    def __init__(self, path: Path, task: dict[str, Any]):
        self.path, self.task, self.ended = path, task, 0.0
        self.samples = task["prompts_per_step"] * task["samples_per_prompt"]
        self.before: list[torch.Tensor] = []
        self.change: dict[str, float] = {}
        path.unlink(missing_ok=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.task["num_steps"] == 1:
            self.before = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ended = time.time()
        if self.before:
            self.change["share_moved"] = share_moved(self.before, model.parameters(), args.learning_rate)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if not state.is_world_process_zero or "reward" not in logs:
            return
        line = {
            "time": self.ended,
            "reward": float(logs["reward"]),
            "tokens": float(logs["completions/mean_length"]) * self.samples,
            "metrics": {n: float(v) for n, v in logs.items() if "time" in n or n == "grad_norm"} | self.change,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
