"""A tool that searches documents of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshrl.agent.tools import Tool, as_tool
from meshrl.core.errors import ConfigError
from meshrl.data.tables import column_of, open_table

_MAX_RESULTS = 10


def search_tool(documents: str | Path, key: str) -> Tool:
    """The tool `search` over the rows of a table, such as JSONL, whose column `text` has the documents: by BM25 of
    their words, best first. key: of the path in errors. The index is made now."""
    try:
        import bm25s
    except ImportError:
        raise ConfigError(f"{key}: the package bm25s is not installed: pip install 'meshrl[agents]'") from None
    texts = list[str]()
    for row in open_table(documents).rows():
        row.require_read()
        texts.append(str(column_of(row.data, "text", key, row.where)))
    if not texts:
        raise ConfigError(f"{key}: {documents} has no rows")
    index = bm25s.BM25(backend="numpy")
    index.index(_words(texts), show_progress=False)

    def search(query: str, limit: int = 3) -> str:
        """Searches documents for words and returns the best ones.

        Args:
            query: the words
            limit: how many documents are returned, at most 10
        """
        count = max(1, min(limit, _MAX_RESULTS, len(texts)))
        found, scores = index.retrieve(_words([query]), k=count, show_progress=False, backend_selection="numpy")
        best = [texts[i] for i, score in zip(found[0].tolist(), scores[0].tolist()) if score > 0]
        return "\n\n".join(best) or "no document has these words"

    return as_tool(search, key)


def _words(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, show_progress=False)
