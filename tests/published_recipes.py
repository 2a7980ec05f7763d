"""How much of published recipes `meshrl translate` maps: for its test, and for the page of scripts/make_docs.py."""

from functools import cache
from pathlib import Path

import yaml

from meshrl.tools.translate.command import UNKNOWN, Translation, translate_settings
from meshrl.tools.translate.read import yaml_value

SECTIONS = {letter: f"actor_rollout_ref.{name}" for letter, name in zip("ARFM", ("actor", "rollout", "ref", "model"))}


@cache
def translations() -> dict[str, Translation]:
    """Of each recipe, by its name."""
    recipes = yaml.safe_load((Path(__file__).parent / "published_recipes.yaml").read_text(encoding="utf-8"))
    made = {}
    for framework, texts in recipes.items():
        for recipe, text in texts.items():
            pairs = [word.partition("=")[::2] for word in text.split()]
            settings = {_full(name): yaml_value(value) for name, value in pairs}
            made[recipe] = translate_settings(framework, settings, {"rows": 7473, "num_processes": 1})
    return made


def _full(name: str) -> str:
    section, _, rest = name.partition(".")
    return f"{SECTIONS[section]}.{rest}" if section in SECTIONS else name


def shares(framework: str) -> tuple[int, int, float, float, float]:
    """(recipes, settings, share that sets keys, share of comments with a reason, share of unknown names)."""
    made = [each for each in translations().values() if each.framework == framework]
    count = sum(len(each.there) for each in made)
    unknown = sum(reason == UNKNOWN for each in made for reason in each.reasons.values())
    reasons = sum(len(each.reasons) for each in made) - unknown
    return len(made), count, 1 - (reasons + unknown) / count, reasons / count, unknown / count
