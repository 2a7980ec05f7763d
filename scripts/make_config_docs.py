"""Write docs/config.md from the config classes: python scripts/make_config_docs.py"""

from pathlib import Path

from meshrl.config.docs import markdown

if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "config.md"
    page.write_text(markdown(), encoding="utf-8")
    print(f"wrote {page}")
