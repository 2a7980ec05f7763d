"""Write docs/faults.md from the table of injected faults: python scripts/make_faults_docs.py"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"


def page() -> str:
    """The text that tests/faults/fault_cases.py generates."""
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    from fault_cases import page

    return page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
