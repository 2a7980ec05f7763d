"""The config's check of a chat template, before a model or tokenizer is loaded; golden/refused.txt has its faults."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from meshrl.config import load as config_load
from meshrl.data.check import check_data

load_run_config = partial(config_load.load_run_config, further=[check_data])
load_sft_config = partial(config_load.load_sft_config, further=[check_data])

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ tone }}{% endfor %}"


@pytest.fixture(params=["data", "sft"])
def load(request, good: Path, good_sft: Path):
    """load(overrides): the section with the template; the overrides are written without the section's name."""
    section = request.param
    load_config, path = (load_run_config, good) if section == "data" else (load_sft_config, good_sft)

    def load_section(*overrides: str):
        config = load_config(path, [f"{section}.{override}" for override in overrides]).config
        return getattr(config, section)

    return load_section


def test_a_template_file_is_found_next_to_the_config_and_its_path_made_absolute(load, good: Path):
    (good.parent / "chat.jinja").write_text(TEMPLATE)
    section = load("chat_template=chat.jinja", "chat_template_kwargs.tone=kind")
    assert section.chat_template == str(good.parent / "chat.jinja")
    assert section.chat_template_kwargs == {"tone": "kind"}


def test_a_template_may_be_the_text_itself(load):
    assert load(f"chat_template={TEMPLATE!r}").chat_template == TEMPLATE


def test_variables_alone_are_left_to_the_tokenizers_own_template(load):
    assert load("chat_template_kwargs={enable_thinking: false}").chat_template_kwargs == {"enable_thinking": False}


def test_the_check_of_a_template_imports_neither_torch_nor_transformers(good: Path):
    overrides = [f"data.chat_template={TEMPLATE!r}", "data.chat_template_kwargs.tone=x"]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from meshrl.config.load import load_run_config\n"
        f"load_run_config({str(good)!r}, {overrides!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
