# %% [markdown]
# # GRPO from a notebook
#
# A tiny Qwen2 model with random weights learns to answer in digits, from a reward function that is defined here. This
# takes seconds on one CPU core. The cells run in Jupyter (`notebook_grpo.ipynb`), in editors that support `# %%`, or
# all at once, from the root of the checkout:
#
#     python examples/notebook_grpo.py

# %%
import sys
import tempfile
from pathlib import Path

import meshrl
from meshrl.monitor.sinks import text_curve

sys.path.insert(0, "quickstart" if Path("quickstart").is_dir() else "examples/quickstart")
import task

folder = Path(tempfile.mkdtemp())
task.build_tokenizer(folder / "model")
task.build_model(folder / "model", seed=0)
rows = [{"question": f"2*{n}", "answer": str(2 * n)} for n in range(10_000, 10_400)]


# %% [markdown]
# The reward of an answer is the share of digits among its characters. It runs in a worker process, which is killed if
# it hangs.


# %%
def digits(completion, answer):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def on_step(step, metrics):
    if step % 5 == 0:
        print(f"step {step:2}  reward {metrics['reward/mean']:.3f}  entropy {metrics['loss/entropy']:.3f}")
    return metrics["reward/mean"] < 0.95  # False ends the run


config = {
    "model": {"path": folder / "model", "dtype": "float32"},
    "train": {"activation_checkpointing": False, "optimizer": {"lr": 5e-3}},
    "rollout": {"sampling": {"max_new_tokens": 6}},
    "data": {"max_prompt_tokens": 32},
    "loop": {"num_steps": 60, "prompts_per_step": 16, "samples_per_prompt": 8},
    "cluster": {"executor": "inline"},  # all in this process; "processes" starts one for each device
    "run": {"folder": folder / "runs", "name": "digits"},
}
run = meshrl.train(
    config,
    rewards={"digits": digits},
    data=rows[:384],
    eval_data=rows[384:],
    on_step=on_step,
    quiet=True,
)

# %% [markdown]
# The result has all metrics of all steps, the answers of the last step, and a model that `from_pretrained` loads. The
# run's folder has the same, with a report.

# %%
print("mean reward by step")
print(text_curve(run.metrics["reward/mean"], width=60, height=8))
for trajectory in run.trajectories()[::8][:3]:  # one answer of each of three groups
    print(trajectory.prompt.messages[-1]["content"], "->", trajectory.turns[-1].messages[-1]["content"])
print("report", run.folder / "report.html")

# %%
evaluation = meshrl.evaluate(config, model=run.model, rewards={"digits": digits}, eval_data=rows[384:], quiet=True)
before, after = run.metrics["eval/mean_at_k"][0], evaluation.metrics["eval/mean_at_k"]
print(f"held-out reward {before:.3f} before, {after:.3f} after")
