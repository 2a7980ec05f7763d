from __future__ import annotations

import logging as logging_of_python
from pathlib import Path

import pytest
from tiny_run import write_run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, rows and a config.yaml."""
    folder = tmp_path_factory.mktemp("intact") / "home"
    folder.mkdir()
    write_run(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """No log messages: Transformers and torch would log about hundreds of damaged files."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging_of_python.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)
