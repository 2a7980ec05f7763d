"""Each family of tests/model_families.py: what it is proven to do, and the reasons of what it does not.

The checks are those of `meshrl model-check`: meshrl against Transformers' own eager forward in fp32, on tiny models all
of whose values matter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_families import COLUMNS, FAMILIES, SAMPLE, config_of, page
from rank_pool import RankPool

from meshrl.core.errors import ConfigError
from meshrl.tools.model_check.checks import CHECKS, findings
from meshrl.tools.model_check.small_model import write_random_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in FAMILIES])
def test_a_family_has_exactly_what_its_entry_states(family: str, pool: RankPool, tmp_path: Path):
    """Also a reason that no longer holds is a failure: correct the entry, and run scripts/make_docs.py."""
    entry = FAMILIES[family]
    write_random_model(config_of(family), tmp_path)
    if entry.refused:
        with pytest.raises(ConfigError) as error:
            dict(findings(tmp_path, pool.run))
        assert entry.refused in str(error.value)
        return
    results = dict(findings(tmp_path, pool.run))
    assert results.keys() == CHECKS.keys()
    passed = {name for name, found in results.items() if found.proven}
    assert {name: str(found) for name, found in results.items() if (name in passed) == (name in entry.without)} == {}


def test_the_page_states_what_the_entries_do():
    """Of at least 50 architectures that train and sample."""
    assert page() == (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), "run scripts/make_docs.py"
    assert sum(not entry.refused for entry in FAMILIES.values()) >= 50
    assert COLUMNS.keys() == CHECKS.keys() and all(entry.without.keys() <= CHECKS.keys() for entry in FAMILIES.values())
