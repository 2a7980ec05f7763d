"""The turn that is made from the parts of a server's answer."""

from __future__ import annotations

import numpy as np

from meshrl.core.types import Request
from meshrl.rollout.admission import Bounds
from meshrl.rollout.server.answer import MIXED, AnswerPart, ServerAnswer


def test_tokens_of_mixed_weights_are_dropped_with_their_most_likely_tokens():
    request = Request(id="a", context_ids=np.array([1, 2], np.int32), want=("topk:1",))
    answer = ServerAnswer(request, Bounds(stop_ids=frozenset(), limit=8, limit_reason="length"), "server", {"first": 0})
    answer.add(
        AnswerPart(
            tokens=[3, 4, 5],
            logprobs=[-0.1] * 3,
            top=[[(-0.1, 3)], [(-0.1, 4)], [(-0.1, 5)]],
            context=[1, 2],
            label_spans=[{"version": "first", "start": 0, "end": 2}, {"version": MIXED, "start": 2, "end": 3}],
            reason="stop",  # by a token of the mixed weights
        )
    )
    turn = answer.turn("engine")
    assert turn.output_ids.tolist() == [3, 4] and turn.stop_reason == "abort"
    assert turn.extras["topk_ids"].tolist() == [[3], [4]] and turn.extras["topk_logprobs"].shape == (2, 1)
