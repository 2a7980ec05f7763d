"""Faults of a turn's two ends: how a chat template renders what comes before it, and where sampling stops."""

from __future__ import annotations

from fault import Fault

_TEMPLATE = "tests/unit/data/test_chat_template.py::"
_STOP = "tests/unit/rollout/test_stop_strings.py::"
_RUN = "tests/e2e/test_template_and_stops.py::"

TURN_FAULTS = [
    Fault(
        "the chat template's variables are left out",
        "meshrl/data/chat.py",
        "**tokenizer.init_kwargs.get(_VARIABLES, {}),",
        "**{},",
        (_TEMPLATE + "test_variables_reach_prompts_continuations_and_sft_rows_alike",),
    ),
    Fault(
        "a misspelt variable of a chat template is passed on in silence",
        "meshrl/data/chat.py",
        "        if name not in reads:",
        "        if not name:",
        (_TEMPLATE + "test_a_misspelt_variable_names_what_the_template_reads",),
    ),
    Fault(
        "a model is saved with another chat template than it was trained with",
        "meshrl/run/models.py",
        "        write_template(aside, chat_template)",
        "        write_template(aside, None)",
        (_RUN + "test_supervised_training_takes_the_same_keys_and_saves_the_template",),
    ),
    Fault(
        "the token with which the template ends a turn does not stop the sampler",
        "meshrl/data/chat.py",
        "sorted(found | _end_of_turn(tokenizer))",
        "sorted(found)",
        ("tests/unit/data/test_chat.py::test_the_token_with_which_the_template_ends_a_turn_is_a_stop_id",),
    ),
    Fault(
        "a stop string that lies in two tokens is not seen",
        "meshrl/rollout/stop_strings.py",
        "        self._tail += self._bytes_of(token)",
        "        self._tail = self._bytes_of(token)",
        (_STOP + "test_the_end_is_the_first_token_whose_text_completes_a_stop_string",),
    ),
    Fault(
        "a continued turn forgets the beginning of a stop string",
        "meshrl/rollout/stop_strings.py",
        "            search.skip(request.prefix_output)",
        "            pass",
        (_STOP + "test_a_continuation_ends_where_the_whole_turn_would_have[3]",),
    ),
    Fault(
        "what a server samples after a stop string is trained",
        "meshrl/rollout/server/answer.py",
        "self._tokens += part.tokens[:kept]",
        "self._tokens += part.tokens",
        (
            "tests/unit/rollout/test_sglang_engine.py::"
            "test_what_the_server_samples_after_a_stop_string_is_no_part_of_the_turn",
        ),
    ),
    Fault(
        "the turn after a stop string follows without an end of turn between them",
        "meshrl/agent/loop.py",
        "ended_by_id=int(so_far[-1]) in stops",
        "ended_by_id=True",
        (
            "tests/unit/agent/test_agents.py::"
            "test_a_turn_that_a_stop_string_ended_is_closed_by_the_template_and_not_trained_to_be",
        ),
    ),
]
