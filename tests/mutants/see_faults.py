"""Faults of what a user looks at: values of tokens, verdicts, marks, links, shares of time."""

from __future__ import annotations

from fault import Fault

_TOOLS = "tests/unit/tools/"
_MONITOR = "tests/unit/monitor/"
_VALUES = "tests/unit/run/test_token_values.py::"

SEE_FAULTS = [
    Fault(
        "the page shows the entropy of the next token",
        "meshrl/monitor/token_log.py",
        'columns["logprobs"], columns["entropies"] = scored',
        'columns["logprobs"], columns["entropies"] = scored[0], np.roll(scored[1], -1)',
        (_VALUES + "test_the_logged_values_are_those_of_the_weights_before_the_step",),
    ),
    Fault(
        "logprobs after the first update stand for those before the step",
        "meshrl/monitor/token_log.py",
        "if sample.old_logprobs is not None:",
        "if sample.old_logprobs is not None and scored is None:",
        (_VALUES + "test_ranks_return_values_only_for_steps_that_are_logged_and_old_logprobs_are_preferred",),
    ),
    Fault(
        "a score that fell within its interval is worse",
        "meshrl/run/verdict.py",
        '"worse" if high < 0 else',
        '"worse" if low < 0 else',
        ("tests/unit/run/test_verdict.py::test_a_difference_within_the_interval_is_no_change",),
    ),
    Fault(
        "a reward that rises while the held-out score falls is not suspicious",
        "meshrl/tools/report/summary.py",
        'run.verdict.outcome != "worse" or',
        'run.verdict.outcome == "worse" or',
        (_TOOLS + "test_report_judgement.py::test_a_reward_that_rises_while_the_held_out_score_falls_is_suspicious",),
    ),
    Fault(
        "embedded data can end its element",
        "meshrl/tools/page/document.py",
        '.replace("<", "\\\\u003c")',
        "",
        (_TOOLS + "test_page_parts.py::test_embedded_data_cannot_end_its_element_and_keeps_every_character",),
    ),
    Fault(
        "pages do not link to one that is written later",
        "meshrl/tools/page/document.py",
        "        for name in names | {path.name}:",
        "        for name in {path.name}:",
        (_TOOLS + "test_page_parts.py::test_pages_of_a_folder_link_to_each_other_as_soon_as_they_exist",),
    ),
    Fault(
        "exposed communication counts as computation",
        "meshrl/monitor/recorder.py",
        "        ratio = max(0, train_ns - exposed_ns) / comm_ns",
        "        ratio = train_ns / comm_ns",
        (
            _MONITOR
            + "test_recorder.py::test_the_ratio_is_of_the_training_phases_and_counts_overlapping_collectives_once",
        ),
    ),
    Fault(
        "a rank that is the later one in three steps is slow",
        "meshrl/tools/diagnose/measure.py",
        "is_named = len(times) >= MIN_STEPS and",
        "is_named = len(times) > 2 and",
        (_TOOLS + "test_causes.py::test_three_steps_are_too_few_to_name_a_slow_rank",),
    ),
    Fault(
        "keys of meshrl train are advice for every trace",
        "meshrl/tools/diagnose/causes.py",
        'texts.get(program) or texts["train"]',
        'texts["train"]',
        (_TOOLS + "test_causes.py::test_what_to_change_fits_the_program_that_made_the_trace",),
    ),
    Fault(
        "a part of a rank's time that overlaps with another one counts twice",
        "meshrl/tools/diagnose/measure.py",
        "        time = without(time, part)",
        "        time = time",
        (_TOOLS + "test_intervals.py::test_the_time_of_each_rank_adds_up_on_any_trace",),
    ),
]
