"""The tool `search` over the documents of a file."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from meshrl.agent.loop import MultiTurn
from meshrl.agent.parsing import ToolCall
from meshrl.agent.search import search_tool
from meshrl.agent.tools import call_tool
from meshrl.core.errors import ConfigError, DataError

TEXTS = ["cats are animals", "dogs chase cats and other dogs", "the sky is blue", "Paris is in France"]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_best_documents_are_returned(tmp_path: Path):
    pytest.importorskip("bm25s")
    tool = search_tool(written(tmp_path, *({"text": text} for text in TEXTS)), "key")

    def found(**arguments: object) -> str:
        return asyncio.run(call_tool({"search": tool}, ToolCall("c", "search", json.dumps(arguments))))

    assert found(query="Where is Paris?") == TEXTS[3]
    assert found(query="dogs or cats", limit=1) == TEXTS[1]
    assert set(found(query="cats", limit=99).split("\n\n")) == {TEXTS[0], TEXTS[1]}
    assert found(query="cats", limit=-1) in TEXTS[:2]
    assert found(query="zebras") == found(query="") == "no document has these words"
    assert found() == "error: search takes the arguments ['limit', 'query'], of which ['query'] are required; got []"
    agent = MultiTurn(tools=["calculator"], documents=str(tmp_path / "documents.jsonl"))
    assert [each["function"]["name"] for each in agent.tools] == ["calculator", "search"]


def test_what_has_no_documents_is_refused(tmp_path: Path):
    pytest.importorskip("bm25s")
    with pytest.raises(DataError, match=r"documents\.jsonl:1: no column 'text'.*agent\.args\.documents"):
        MultiTurn(documents=str(written(tmp_path, {"words": "a"})))
    with pytest.raises(ConfigError, match=r"agent\.args\.documents: .* has no rows"):
        MultiTurn(documents=str(written(tmp_path)))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"agent\.args\.documents: the package bm25s .*'meshrl\[agents\]'"):
        MultiTurn(documents=str(written(tmp_path, {"text": "a"})))
