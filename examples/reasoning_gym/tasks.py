"""Rows and rewards of a task of reasoning-gym: pip install reasoning-gym (it compiles C).

    python examples/reasoning_gym/tasks.py chain_sum --size 2000 --out runs/chain_sum.jsonl

    data: {path: runs/chain_sum.jsonl}
    reward: {terms: {score: {kind: "tasks:score"}}}
    run: {module_folder: examples/reasoning_gym}

A row names its task, size, seed and index, by which the library makes the entry again: JSON would not keep its types.
"""

import argparse
import functools
import json
from pathlib import Path

import reasoning_gym

dataset = functools.lru_cache(maxsize=64)(reasoning_gym.create_dataset)


def score(completion, answer, prompt):
    """0 to 1 for the text in the last <answer> tags."""
    row = prompt["meta"]
    tasks = dataset(row["task"], size=row["size"], seed=row["seed"])
    _, tag, rest = completion.rpartition("<answer>")
    return tasks.score_answer(answer=rest.partition("</answer>")[0].strip() if tag else None, entry=tasks[row["index"]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="such as chain_sum")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    names = {"task": args.task, "size": args.size, "seed": args.seed}
    with args.out.open("w") as file:
        for index, entry in enumerate(dataset(args.task, size=args.size, seed=args.seed)):
            question = f"{entry['question']}\nEnd with <answer>your answer</answer>."
            file.write(json.dumps({"question": question, "answer": entry["answer"], **names, "index": index}) + "\n")
