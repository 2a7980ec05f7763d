"""One step off: how much of the shorter phase of a step disappears behind the longer one.

    python benchmarks/overlap.py

One train rank and one sampler, each with one core of the same machine, and a model of random weights, so that all
answers have the same length. The number of prompts is chosen so that sampling and training take equally long. Three
contenders take turns, each as a complete run:

    in_turn         loop.kind colocated on these two ranks: one phase after the other. It measures each phase alone
    one_step_off    the same ranks, overlapped
    both_cores      loop.kind colocated on two ranks that train and sample, each on its own core

over_longer_phase: seconds of a step of one_step_off over those of the longer phase alone. over_in_turn: over a step of
in_turn. over_both_cores has no bar: with phases of R and T seconds on one core, one_step_off needs at least max(R, T)
and both_cores at least (R + T) / 2 if both phases are twice as fast on two cores, so that the ratio is at least 1 for
equal phases; it is below 1 as far as they are not twice as fast.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import Report, median, paired_ratio, parser
from workload import SHAPES

import meshrl

CONTENDERS: dict[str, dict[str, dict[str, Any]]] = {
    "in_turn": {"loop": {"kind": "colocated"}, "cluster": {"num_rollout_ranks": 1}},
    "one_step_off": {"loop": {"kind": "one_step_off"}, "cluster": {"num_rollout_ranks": 1}},
    "both_cores": {"loop": {"kind": "colocated"}, "cluster": {"num_train_ranks": 2}},
}
SAMPLES = 8
WARM_UP_STEPS = 2


def share_of_digits(completion: str, answer: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def model_folder(shape: str, folder: Path) -> Path:
    """A model of random weights with the quickstart's tokenizer, which almost never ends an answer."""
    import sys

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples.quickstart.task import build_tokenizer

    folder.mkdir(parents=True)
    tokenizer, facts = build_tokenizer(folder), SHAPES[shape]
    torch.manual_seed(0)
    heads = facts["num_attention_heads"]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **facts,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def run(contender: str, model: Path, folder: Path, prompts: int, num_steps: int, new_tokens: int) -> dict[str, float]:
    """A complete run. Returns medians over its steps after the first: seconds of a step and of its phases."""
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "train": {"activation_checkpointing": False, "optimizer": {"lr": 1e-5}},
        "rollout": {"sampling": {"max_new_tokens": new_tokens}, "max_running_requests": 1024},
        "data": {"max_prompt_tokens": 64},
        "loop": {"num_steps": num_steps, "prompts_per_step": prompts, "samples_per_prompt": SAMPLES},
        "cluster": {"num_train_ranks": 1},
        "run": {"folder": tempfile.mkdtemp(dir=folder), "name": contender},
    }
    for section, values in CONTENDERS[contender].items():
        config[section] |= values
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(1000)]
    found = meshrl.train(config, data=rows, rewards={"digits": share_of_digits}, quiet=True)
    lines = [line for line in found.lines if "reward/mean" in line.metrics]
    measured = lines[WARM_UP_STEPS:]

    def seconds(*phases: str) -> float:
        return median([sum(line.metrics.get(f"time/{phase}_s", 0.0) for phase in phases) for line in measured])

    return {
        "step": median(np.diff([line.time for line in lines[WARM_UP_STEPS - 1 :]]).tolist()),
        "rollout": seconds("rollout", "reward"),
        "train": seconds("train"),
        "sync": seconds("sync"),
        "wait": seconds("wait"),
        "train_idle": median([line.metrics.get("run/train_idle", 0.0) for line in measured]),
        "rollout_idle": median([line.metrics.get("run/rollout_idle", 0.0) for line in measured]),
    }


def balanced(model: Path, folder: Path, args: Any) -> int:
    """The number of prompts at which both phases take equally long: sampling has a fixed part, so it takes longer than
    training for few prompts, and shorter for many."""
    prompts = args.prompts
    for _ in range(args.tries):
        found = run("in_turn", model, folder, prompts, WARM_UP_STEPS + 3, args.new_tokens)
        ratio = found["rollout"] / found["train"]
        print(f"{prompts} prompts: sampling {found['rollout']:.2f} s, training {found['train']:.2f} s", flush=True)
        if 0.95 < ratio < 1.05:
            break
        prompts = max(2, round(prompts * min(2.5, max(0.4, ratio**1.5))))
    return prompts


def main() -> None:
    p = parser(__doc__, rounds=5)
    p.add_argument("--shape", default="5M", choices=list(SHAPES), help="of the model (default 5M)")
    p.add_argument("--prompts", type=int, default=8, help="prompts of the first try (default 8)")
    p.add_argument("--new-tokens", type=int, default=192, help="length of an answer (default 192)")
    p.add_argument("--steps", type=int, default=8, help="measured steps of a run (default 8)")
    p.add_argument("--tries", type=int, default=6, help="runs to balance the phases (default 6)")
    args = p.parse_args()
    if args.smoke:
        args.shape, args.prompts, args.new_tokens, args.steps, args.tries, args.rounds = "smoke", 2, 4, 2, 1, 1
    report = Report("overlap", args)
    folder = Path(tempfile.mkdtemp(prefix="overlap-"))
    model = args.model or model_folder(args.shape, folder / "model")
    prompts = balanced(model, folder, args)
    report.figure("prompts_per_step", prompts)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for i in range(args.rounds):
        for name in list(CONTENDERS) if i % 2 == 0 else list(CONTENDERS)[::-1]:
            found[name].append(run(name, model, folder, prompts, args.steps + WARM_UP_STEPS, args.new_tokens))
            shown = ", ".join(f"{what} {value:.3f}" for what, value in found[name][-1].items())
            report.print_line(f"round {i} {name}: {shown}")
    report.raw["runs"] = found
    alone = found["in_turn"]
    phases = paired_ratio([r["rollout"] for r in alone], [r["train"] for r in alone])
    report.bar("phases_equal", abs(np.log(report.figure("rollout_over_train", phases))), at_most=np.log(1.1))
    steps = {name: [r["step"] for r in rounds] for name, rounds in found.items()}
    longer = [max(r["rollout"], r["train"]) for r in alone]
    report.bar(
        "over_longer_phase",
        report.figure("over_longer_phase", paired_ratio(steps["one_step_off"], longer)),
        at_most=1.15,
    )
    report.bar(
        "over_in_turn",
        report.figure("over_in_turn", paired_ratio(steps["one_step_off"], steps["in_turn"])),
        at_most=0.6,
    )
    report.figure("over_both_cores", paired_ratio(steps["one_step_off"], steps["both_cores"]))
    for name in ("rollout", "train"):
        speed_up = paired_ratio([r[name] for r in alone], [r[name] for r in found["both_cores"]])
        report.figure(f"{name}_speed_up_by_two_cores", speed_up)
    for side in ("train_idle", "rollout_idle"):
        for name in ("in_turn", "one_step_off"):
            report.figure(f"{side}_{name}", median([r[side] for r in found[name]]))
    report.finish()


if __name__ == "__main__":
    main()
