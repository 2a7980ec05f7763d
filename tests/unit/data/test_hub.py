"""A tokenizer of the hub: how often the hub is asked, and what is reported. The hub is a server of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from meshrl.core.errors import DataError
from meshrl.data.chat import load_tokenizer
from meshrl.data.files import require_reachable
from meshrl.data.tables import open_table

NAME = "organisation/no-model"


class Hub(HTTPServer):
    """Counts requests for the model, and answers them with `status`; None = it closes the connection."""

    status: int | None = None
    num_requests = 0


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.num_requests += NAME in self.path
        self.close_connection = True
        if self.server.status is not None:
            self.send_error(self.server.status)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()
        thread.join()


def test_a_hub_that_does_not_answer_is_asked_once(hub: Hub):
    """Transformers' loader asked it 13 times within a minute, and then reported a missing tokenizer.json."""
    with pytest.raises(DataError, match=rf"can't be reached: .*hf download {NAME} .*model\.path=FOLDER"):
        load_tokenizer(NAME)
    assert hub.num_requests == 1


def test_a_hub_that_does_not_answer_is_asked_once_for_a_data_set(hub: Hub):
    """`datasets` then reads its cache at once, and is not offline for the next data set."""
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(DataError, match=r"Hugging Face hub: can't be reached: .*save_to_disk"):
        open_table(NAME, split="train")
    assert hub.num_requests == 1
    assert before == datasets.config.HF_HUB_OFFLINE


def test_the_loader_reports_what_a_hub_answers(hub: Hub):
    hub.status = 404
    with pytest.raises(DataError, match="no tokenizer could be loaded") as error:
        load_tokenizer(NAME)
    assert "can't be reached" not in str(error.value) and "no such file" not in str(error.value)


def test_a_model_in_the_cache_needs_no_hub(hub: Hub, tmp_path: Path):
    folder = tmp_path / "models--organisation--no-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    require_reachable(NAME)
    assert hub.num_requests == 0


def test_in_offline_mode_the_text_names_the_mode(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="not asked in offline mode"):
        load_tokenizer(NAME)
    assert hub.num_requests == 0
