"""Faults of agents, chat templates, data and graders: wrong tokens, wrong masks, wrong rewards."""

from __future__ import annotations

from fault import Fault

_ARGUMENT_TYPES = "tests/unit/agent/test_argument_types.py::"
_FLATTEN = "tests/unit/agent/test_flatten.py::"
_CHAT = "tests/unit/data/test_chat.py::"
_CHAT_TEMPLATE = "tests/unit/data/test_chat_template.py::"
_EXPRESSION_SIZE = "tests/unit/reward/test_expression_size.py::"
_MATH_ANSWER_STYLES = "tests/unit/reward/test_math_answer_styles.py::"
_SCORER = "tests/unit/reward/test_scorer.py::"
_SELF_TEST = "tests/unit/reward/test_self_test.py::"

FAULTS = [
    Fault(
        "sampled end tokens are not trained",
        "meshrl/agent/flatten.py::_row",
        "mask[end - r : end] = i not in trained_before => mask[end - r : end - 1] = i not in trained_before",
        _FLATTEN + "test_every_sampled_token_is_trained_whatever_its_value",
    ),
    Fault(
        "the prompt is trained",
        "meshrl/agent/flatten.py::_row",
        "mask[end - r : end] = i not in trained_before => mask[1:end] = i not in trained_before",
        _FLATTEN + "test_one_turn_becomes_the_row_of_the_worked_example",
    ),
    Fault(
        "the first context of an agent does not show its tools",
        "meshrl/agent/loop.py::MultiTurn.run",
        "prompt_ids(prompt, ctx.tokenizer, self.tools) => prompt_ids(prompt, ctx.tokenizer, [])",
        "tests/unit/agent/test_first_turns.py::test_the_first_context_of_an_agent_with_tools_shows_them",
    ),
    Fault(
        "no end-of-turn token follows a turn that a stop string ended",
        "meshrl/agent/loop.py::next_context",
        "last if last in stops else None => last",
        "tests/unit/agent/test_agents.py::test_after_a_stop_string_the_template_ends_the_turn_with_untrained_tokens",
    ),
    Fault(
        "a tool gets True where its schema requires a number",
        "meshrl/agent/tools.py::_check_type",
        "isinstance(value, bool) and not {bool, object} & {*allowed} => False",
        _ARGUMENT_TYPES + "test_a_tool_gets_only_values_of_the_type_in_its_schema[number-boolean]",
    ),
    Fault(
        "supervised rows do not train their end token",
        "meshrl/data/chat.py::sft_row",
        "mask[len(head) : end] = True => mask[len(head) : end - 1] = True",
        _CHAT + "test_sft_trains_the_answer_and_its_end_token_and_nothing_after",
    ),
    Fault(
        "the chat template does not get its variables",
        "meshrl/data/chat.py::_apply_template",
        "tokenizer.init_kwargs.get(_VARIABLES, {}) => {}",
        _CHAT_TEMPLATE + "test_variables_reach_prompts_continuations_and_sft_rows_alike",
    ),
    Fault(
        "a misspelt variable of a chat template is silently accepted",
        "meshrl/data/chat.py::require_read",
        "name not in reads => not name",
        _CHAT_TEMPLATE + "test_the_error_for_a_misspelt_variable_lists_the_templates_variables",
    ),
    Fault(
        "the token with which the template ends a turn does not stop the sampler",
        "meshrl/data/chat.py::stop_token_ids",
        "ids | _end_of_turn(tokenizer) => ids",
        _CHAT + "test_the_token_with_which_the_template_ends_a_turn_is_a_stop_id",
    ),
    Fault(
        "a run resumes with other rows in memory",
        "meshrl/data/order.py::digest_of",
        r'name.encode() + b"\0" + (b"" if ids is None else ids.tobytes()) => name.encode()',
        "tests/unit/data/test_rows_in_memory.py::test_a_resume_with_other_rows_is_refused",
    ),
    Fault(
        "a chat template may run for ever",
        "meshrl/data/time_limit.py::_interrupt_all",
        "now > deadline => now < 0",
        "tests/fuzz/test_fuzz_tokenizer.py::test_a_template_that_takes_too_long_is_stopped_and_the_line_named",
    ),
    Fault(
        "a chain of carets is parsed",
        "meshrl/reward/expression_size.py::can_be_parsed",
        "_SLOW_RUN.search(text) => False",
        _EXPRESSION_SIZE + "test_a_too_large_expression_is_wrong_unless_it_equals_the_reference",
    ),
    Fault(
        "a power tower is evaluated",
        "meshrl/reward/expression_size.py::num_digits",
        "max(sizes[0] * _value(sizes[1]), largest) => largest",
        _EXPRESSION_SIZE + "test_a_too_large_expression_is_wrong_unless_it_equals_the_reference",
    ),
    Fault(
        "a Markdown heading counts as the answer mark",
        "meshrl/reward/final_answer.py::marked_answer",
        r'_MARKED_LINE.fullmatch(text.rstrip().rpartition("\n")[2].strip()) => re.search("#### ([0-9]+)", text)',
        _MATH_ANSWER_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",
    ),
    Fault(
        "the answer is read from the reasoning",
        "meshrl/reward/final_answer.py::answer_section",
        'completion.rpartition("</think>")[2] => completion',
        _MATH_ANSWER_STYLES + "test_the_rule_math_verify_reads_the_same_styles",
    ),
    Fault(
        "the last number of an unparsable box counts as its value",
        "meshrl/reward/math_answer.py::_parsed",
        "in_box if box_contents(text) else anywhere => anywhere",
        _MATH_ANSWER_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",
    ),
    Fault(
        "numbers below 1e-6 are all equal",
        "meshrl/reward/math_answer.py::_equal",
        "max(0, -1 - math.floor(math.log10(size))) => 0",
        _MATH_ANSWER_STYLES + "test_the_rule_math_verify_reads_the_same_styles",
    ),
    Fault(
        "a number in prose is read without the formula around it",
        "meshrl/reward/final_answer.py::_expression",
        "if _is_formula(listed): return listed"
        " => if _is_formula(listed) and (number := re.search(_NUMBER, listed)): return number[0]",
        _MATH_ANSWER_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",
    ),
    Fault(
        "a limit in prose is read as the value",
        "meshrl/reward/final_answer.py::_expression",
        "_LIMIT.search(statement[:start]) => False",
        _MATH_ANSWER_STYLES + "test_the_default_rule_grades_the_answer_that_is_stated",
    ),
    Fault(
        "an answer to which no term applies counts as lost",
        "meshrl/reward/score.py::Scorer._reward",
        "trajectory.has_abstained = True => pass",
        _SCORER + "test_a_term_that_returns_none_does_not_apply",
    ),
    Fault(
        "a failed grading counts as 0",
        "meshrl/reward/score.py::Scorer._reward",
        "if isinstance(value, Failure): return None => if isinstance(value, Failure): continue",
        _SCORER + "test_a_failed_grading_leaves_no_reward_and_is_counted",
    ),
    Fault(
        "the self-test accepts equal scores for right and wrong answers",
        "meshrl/reward/self_test.py::try_math_answer",
        "not right > wrong => right < wrong",
        _SELF_TEST + "test_a_math_verify_that_calls_all_answers_equal_or_unequal_ends_the_run[True]",
    ),
    Fault(
        "the self-test does not use the term's rule",
        "meshrl/reward/self_test.py::try_math_answer",
        'term.args.get("rule", "auto") => "gsm8k"',
        _SELF_TEST + "test_built_in_kinds_pass_with_all_their_rules_without_a_note",
    ),
    Fault(
        "an answer that exceeds the CPU time counts as a failed grading",
        "meshrl/reward/worker.py::serve",
        "list(cpu_limits) => []",
        _SCORER + "test_an_answer_that_math_answer_can_not_evaluate_in_its_cpu_time_is_wrong_and_counted",
    ),
    Fault(
        "a reply of user code without the name of the request is a reward",
        "meshrl/reward/replies.py::parse_reply",
        'not isinstance(reply, dict) or reply.get("request") != request => not isinstance(reply, dict)',
        "tests/unit/reward/test_reward_sandbox.py::test_a_reply_between_two_batches_is_no_answer_to_the_next",
    ),
    Fault(
        "nulls that unified columns fill in are trained",
        "meshrl/data/datasets.py::messages_of",
        "without_nulls(value) if is_filled else value => value",
        "tests/unit/data/test_messages.py::test_keys_that_unified_columns_fill_with_null_are_not_trained",
    ),
    Fault(
        "the role token of the next message is lost after another stop id",
        "meshrl/data/chat.py::continuation_ids",
        "return full[end - 1 :] => return full[end:]",
        _CHAT + "test_the_next_role_has_its_token_whichever_stop_id_was_sampled",
    ),
    Fault(
        "a template with another form of calls is accepted",
        "meshrl/agent/loop.py::require_tools_in_template",
        "not any(map(_is_stand_in, tool_calls(written))) => not tool_calls(written)",
        "tests/unit/agent/test_agents.py::test_a_template_whose_calls_are_not_read_is_refused",
    ),
    Fault(
        "two times are compared as quotients",
        "meshrl/reward/answer_forms.py::equal_by_form",
        "moments and wanted_moments => False",
        "tests/unit/reward/test_answer_forms.py::test_the_default_rule_grades_answers_of_every_form",
    ),
    Fault(
        "a reference that can't be read counts as right in the trial",
        "meshrl/reward/self_test.py::try_references",
        "result != 1.0 => result == 0.0",
        _SELF_TEST + "test_rows_whose_answer_no_completion_meets_are_named_and_more_than_half_of_them_end_the_run",
    ),
]
