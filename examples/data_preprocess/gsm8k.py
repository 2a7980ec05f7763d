"""Prepare GSM8K for a config: writes train.jsonl and test.jsonl of {"question", "answer"}, with their licence.

    python examples/data_preprocess/gsm8k.py                        # from the Hugging Face hub
    python examples/data_preprocess/gsm8k.py --from ~/gsm8k         # from a folder with the two published files

Every row is checked: it must have a question, and a solution with the last line `#### N`, which the reward
`math_answer` with rule gsm8k reads.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from meshrl.core.errors import DataError
from meshrl.data.tables import RawRow, open_table

HUB_ID, SUBSET = "openai/gsm8k", "main"
SPLITS = ("train", "test")
LICENSE = Path(__file__).resolve().parents[1] / "data" / "gsm8k" / "LICENSE"
NOTE = """\
GSM8K: 8.5K grade-school math word problems by OpenAI, github.com/openai/grade-school-math; MIT licence, see LICENSE.
Written by examples/data_preprocess/gsm8k.py from {origin}: {counts}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, help="folder with train.jsonl and test.jsonl as published")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"), help="folder to write (default runs/gsm8k)")
    args = parser.parse_args()
    try:
        write(args.out, args.folder)
    except DataError as error:
        print(f"gsm8k.py: {error}", file=sys.stderr)
        return 1
    return 0


def write(out: Path, folder: Path | None) -> None:
    """Write both splits, the licence and a note into `out`. Raises: DataError for unavailable data or a wrong row."""
    splits = {split: list(checked(rows(split, folder))) for split in SPLITS}  # read everything before writing anything
    out.mkdir(parents=True, exist_ok=True)
    for split, found in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{out / split}.jsonl  {len(found):,} rows")
    shutil.copyfile(LICENSE, out / "LICENSE")
    counts = ", ".join(f"{len(found):,} rows of {split}" for split, found in splits.items())
    origin = f"{HUB_ID} on the Hugging Face hub" if folder is None else f"local files in {folder.name}/"
    (out / "README.md").write_text(NOTE.format(origin=origin, counts=counts), encoding="utf-8")


def rows(split: str, folder: Path | None) -> Iterator[RawRow]:
    """The rows of a split, from a local file or from the hub."""
    if folder is not None:
        return open_table(folder / f"{split}.jsonl").rows()
    try:
        return open_table(HUB_ID, subset=SUBSET, split=split).rows()
    except DataError as error:
        raise DataError(
            f"{error}\nWithout a network: download train.jsonl and test.jsonl from "
            "github.com/openai/grade-school-math (grade_school_math/data) on another machine, and give their folder "
            "with --from FOLDER."
        ) from error


def checked(found: Iterator[RawRow]) -> Iterator[dict[str, str]]:
    """The rows, reduced to question and answer. Raises: DataError for a row that is not from GSM8K."""
    for raw in found:
        question, answer = raw.data.get("question"), raw.data.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
            raise DataError(f"{raw.where}: a row of GSM8K has texts `question` and `answer`; this row is {raw.data}")
        if not re.search(r"#### -?[0-9][0-9.,]*\s*$", answer):
            raise DataError(f"{raw.where}: the answer ends in {answer[-30:]!r}, not in a line like '#### 72'")
        yield {"question": question, "answer": answer}


if __name__ == "__main__":
    sys.exit(main())
