"""Faults at the begin and end of a turn: how a chat template renders its context, and where sampling stops."""

from __future__ import annotations

from fault import Fault

_TEMPLATE = "tests/unit/data/test_chat_template.py::"
_STOP = "tests/unit/rollout/test_stop_strings.py::"
_RUN = "tests/e2e/test_template_and_stops.py::"

TURN_FAULTS = [
    Fault(
        "the chat template does not get its variables",
        "meshrl/data/chat.py",
        "**tokenizer.init_kwargs.get(_VARIABLES, {}),",
        "**{},",
        (_TEMPLATE + "test_variables_reach_prompts_continuations_and_sft_rows_alike",),
    ),
    Fault(
        "a misspelt variable of a chat template is silently accepted",
        "meshrl/data/chat.py",
        "        if name not in reads:",
        "        if not name:",
        (_TEMPLATE + "test_the_error_for_a_misspelt_variable_lists_the_templates_variables",),
    ),
    Fault(
        "a model is saved without the chat template of its training",
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
        "a stop string that spans two tokens is not found",
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
        (_STOP + "test_a_continuation_ends_where_the_uninterrupted_turn_ends[3]",),
    ),
    Fault(
        "tokens that a server samples after a stop string are trained",
        "meshrl/rollout/server/answer.py",
        "self._tokens += part.tokens[:num_output]",
        "self._tokens += part.tokens",
        ("tests/unit/rollout/test_sglang_engine.py::test_tokens_after_a_stop_string_are_not_part_of_the_turn",),
    ),
    Fault(
        "no end-of-turn token follows a turn that a stop string ended",
        "meshrl/agent/loop.py",
        "ended_by_id=int(so_far[-1]) in stops",
        "ended_by_id=True",
        ("tests/unit/agent/test_agents.py::test_after_a_stop_string_the_template_ends_the_turn_with_untrained_tokens",),
    ),
]
