"""A reward function that can't work is refused with the rest of the config, before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.core.errors import ConfigError
from meshrl.run.inputs import load_run

MODULE = """
def score(completion, answer, scale=1.0): return scale
def swapped(prompt, completion): return 1.0
"""


def test_reward_functions_that_can_not_be_called_are_refused_with_key_and_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`--explain` shows them, and no run starts; a function that is fixed in its file passes at the next try."""
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "rewards_of_this_test.py"
    module.write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    kinds = {"a": "scor", "b": "swapped", "c": "score"}
    terms = {name: {"kind": f"rewards_of_this_test:{function}"} for name, function in kinds.items()}
    config = {
        "model": {"path": "organisation/name"},
        "loop": {"num_steps": 2, "prompts_per_step": 2},
        "data": {"path": "rows.jsonl"},
        "reward": {"terms": terms},
    }
    with pytest.raises(ConfigError) as refused:
        load_run(config, ["reward.terms.b.kind=rewards_of_this_test:swapped", "reward.terms.c.args.scal=2"])
    text = " ".join(str(refused.value).split())
    assert "3 problems in this config" in text
    assert "reward.terms.a.kind = rewards_of_this_test:scor [config-dict]" in text
    assert f"{module} has no 'scor'; did you mean 'score'?" in text
    assert "reward.terms.b.kind = rewards_of_this_test:swapped [command line]" in text
    assert "in this order; this function has ['prompt', 'completion']" in text
    assert "no argument 'scal'; allowed: scale; did you mean 'scale'?" in text

    module.write_text(
        MODULE.replace("prompt, completion", "completion, answer").replace("score", "scor") + "\nscore = scor\n\n"
    )
    assert load_run(config).config.reward.terms["a"].kind == "rewards_of_this_test:scor"
