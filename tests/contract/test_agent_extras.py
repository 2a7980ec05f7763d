"""The tools that need packages which `make setup` does not install: their unit tests run with these packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ["tests/unit/agent/test_mcp_servers.py", "tests/unit/agent/test_search_tool.py"]
CODE = "import pytest, sys; sys.path.append(sys.argv[1]); sys.exit(pytest.main(['-rs', *sys.argv[2:]]))"


@pytest.mark.slow
def test_the_unit_tests_of_the_extra_agents_pass_with_its_packages(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(tmp_path)]
    done = subprocess.run([*command, "-r", str(ROOT / "requirements-agents.txt")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the packages are not to be had here: {done.stderr.strip()[-300:]}")
    ran = subprocess.run([sys.executable, "-c", CODE, str(tmp_path), *TESTS], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "SKIPPED" not in ran.stdout, ran.stdout[-3000:]
