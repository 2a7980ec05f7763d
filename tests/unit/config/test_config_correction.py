"""algo.correction: what auto means, its short forms, and what is left to the device."""

import re
from pathlib import Path

import pytest

from meshrl.config.algo import CorrectionConfig, RejectionConfig, correction_of_auto
from meshrl.config.explain import to_yaml
from meshrl.config.load import load_run_config
from meshrl.plan.explain import explain

ENDPOINT = [
    "rollout.engine=endpoint",
    "rollout.endpoint.url=http://h:8000",
    "rollout.endpoint.weights=files",
    "cluster.num_rollout_ranks=1",
]


def correction(config: Path, *overrides: str) -> CorrectionConfig:
    return load_run_config(config, overrides).config.algo.correction


@pytest.mark.parametrize(
    ("staleness", "engine", "kind", "why"),
    [
        (0, "embedded", "auto", "off on a CPU, else truncate"),
        (1, "embedded", "truncate", "loop.max_staleness is 1"),
        (3, "vllm", "truncate", "loop.max_staleness is 3"),
        (0, "vllm", "truncate", "rollout.engine is vllm"),
        (0, "sglang", "truncate", "rollout.engine is sglang"),
        (0, "endpoint", "truncate", "rollout.engine is endpoint"),
    ],
)
def test_auto_corrects_whatever_is_not_exactly_the_trainers_policy(staleness: int, engine: str, kind: str, why: str):
    found, reason = correction_of_auto(staleness, engine)
    assert found == kind and why in reason


def test_a_loaded_config_has_the_kind_that_auto_means_and_explain_shows_why(good: Path):
    """The ranks get this section: an auto that is left in it is no correction on a CPU."""
    assert correction(good) == CorrectionConfig(kind="auto")
    assert correction(good, *ENDPOINT) == CorrectionConfig(kind="truncate", level="token", low=None, high=2.0)
    text = explain(load_run_config(good))
    assert "# kind: by rule" in text and "# here: off on a CPU, else truncate" in text
    assert "# unused: algo.correction.kind is" not in text, "on an accelerator the other keys have an effect"
    text = explain(load_run_config(good, ["algo.correction=off"]))
    assert 'kind: "off"' in text and "# unused: algo.correction.kind is off" in text
    text = explain(load_run_config(good, ENDPOINT))
    assert "kind: truncate" in text and "# default, from auto: rollout.engine is endpoint" in text


@pytest.mark.parametrize(("kind", "staleness"), [("one_step_off", 1), ("fully_async", 2)])
def test_auto_corrects_samples_of_older_weights(good: Path, kind: str, staleness: int):
    overrides = (f"loop.kind={kind}", "cluster.num_rollout_ranks=1")
    assert correction(good, *overrides) == CorrectionConfig(kind="truncate")
    text = explain(load_run_config(good, overrides))
    assert f"# default, from auto: loop.max_staleness is {staleness}" in text
    assert correction(good, *overrides, "loop.max_staleness=0").kind == "auto"


def test_auto_is_off_only_on_the_device_for_which_exactness_was_shown():
    assert [CorrectionConfig().kind_on(device) for device in ("cpu", "cuda", "xpu")] == ["off", "truncate", "truncate"]
    for kind in ("off", "truncate", "mask"):
        assert [CorrectionConfig(kind=kind).kind_on(device) for device in ("cpu", "cuda")] == [kind, kind]


def test_auto_takes_the_keys_of_the_section_where_it_corrects(good: Path):
    found = correction(good, *ENDPOINT, "algo.correction={level: sequence, low: 0.5, high: 8}")
    assert found == CorrectionConfig(kind="truncate", level="sequence", low=0.5, high=8.0)


def test_an_explicit_kind_is_left_as_it_is(good: Path):
    for kind in ("off", "mask", "truncate"):
        assert correction(good, f"algo.correction={kind}").kind == kind
        assert correction(good, f"algo.correction.kind={kind}", *ENDPOINT).kind == kind


def test_short_forms(good: Path, write):
    rejection = RejectionConfig(measure="k3", level="seq_max", high=1.0)
    path = write(
        "base: run.yaml\nalgo:\n  correction: {kind: mask, rejection: {measure: k3, level: seq_max, high: 1}}\n",
        "c.yaml",
    )
    assert correction(path) == CorrectionConfig(kind="mask", rejection=rejection)
    assert correction(path, "algo.correction.rejection=off") == CorrectionConfig(kind="mask")
    assert correction(path, "algo.correction.rejection.high=2").rejection.high == 2
    assert correction(path, "algo.correction=off") == CorrectionConfig(kind="off"), "the complete section is replaced"
    assert correction(path, "algo.correction.kind=off") == CorrectionConfig(kind="off", rejection=rejection)
    again = write(to_yaml(load_run_config(path)), "again.yaml")
    assert correction(again) == correction(path)


def test_no_correction_where_it_is_needed_is_noted(good: Path):
    def notes(*overrides: str, purpose="train") -> list[str]:
        return [n for n in load_run_config(good, overrides, purpose=purpose).notices if "although" in n]

    (note,) = notes(*ENDPOINT, "algo.correction=off")
    assert "rollout.engine is endpoint" in note and "docs/correction.md" in note
    assert notes("algo.correction=off") == notes(*ENDPOINT) == notes() == []
    assert notes(*ENDPOINT, "algo.correction=off", purpose="eval") == []


def test_the_examples_of_the_page_load(good: Path, write):
    """docs/correction.md: the blocks, and the alternatives in their comments."""
    page = (Path(__file__).parents[3] / "docs" / "correction.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        assert correction(write(f"base: run.yaml\n{block}", f"page_{number}.yaml")).kind == "truncate"
    rejections = re.findall(r"(\{measure: .*?\})", blocks[1])
    assert len(rejections) == 3
    for rejection in rejections:
        assert correction(good, f"algo.correction.rejection={rejection}").rejection.measure in rejection
    assert "{kind: mask, low: 0.5, high: 5.0}" in page
    assert correction(good, "algo.correction={kind: mask, low: 0.5, high: 5.0}").low == 0.5
