"""Faults of the config, of seeds, and of files from outside the run."""

from __future__ import annotations

from fault import Fault

_FUZZ_CONFIG = "tests/fuzz/test_fuzz_config.py::"
_FUZZ_DATA = "tests/fuzz/test_fuzz_data.py::"
_CONFIG_CORRECTION = "tests/unit/config/test_config_correction.py::"
_CONFIG_REFUSALS = "tests/unit/config/test_config_refusals.py::"
_DATA_CONFIG = "tests/unit/data/test_data_config.py::"

FAULTS = [
    Fault(
        "an unknown key of a user-defined loss is ignored",
        "meshrl/config/algo.py::_user_function",
        "not takes_any => takes_any",
        "tests/unit/config/test_own_algorithm.py::test_an_algorithm_that_can_not_work_is_refused_with_a_helpful_error",
    ),
    Fault(
        "an unknown config key is ignored",
        "meshrl/config/base.py::Slice",
        '"forbid" => "ignore"',
        _CONFIG_REFUSALS + "test_all_problems_are_reported_at_once_with_file_line_and_command_line",
    ),
    Fault(
        "a reward that needs an answer is accepted without an answer column",
        "meshrl/config/data.py::_answers",
        "not terms => terms",
        _DATA_CONFIG + "test_a_reward_that_compares_with_the_answer_is_refused_where_no_column_has_one",
    ),
    Fault(
        "an auto correction reaches the ranks, which do not correct",
        "meshrl/config/load.py::_resolve",
        'config.algo.correction.kind == "auto" => config.algo.correction.kind == ""',
        _CONFIG_CORRECTION + "test_a_loaded_config_has_the_kind_that_auto_means_and_explain_shows_why",
    ),
    Fault(
        "a value of the config that a Python object replaces is silently ignored",
        "meshrl/config/load.py::_given_twice",
        "problems.append(Problem((key,), problem, value.origin)) => pass",
        "tests/unit/config/test_config_dict.py::test_an_object_replaces_no_value_of_the_config",
    ),
    Fault(
        "the newest model of a run is chosen alphabetically",
        "meshrl/config/model.py::_newest_model",
        "lambda path: (len(path.parent.name), path) => str",
        _CONFIG_REFUSALS + "test_the_folder_of_a_run_in_place_of_a_model_names_the_newest_model"
        "[runs/first-runs/first/checkpoints/step_1000000/model]",
    ),
    Fault(
        "YAML aliases expand to any number of values",
        "meshrl/config/source.py::Reader._read",
        "self._num_values > MAX_VALUES => self._num_values < 0",
        _FUZZ_CONFIG + "test_hostile_yaml_is_refused_within_seconds_and_runs_nothing",
    ),
    Fault(
        "a pipe is read like a file",
        "meshrl/core/files.py::size_of",
        "not stat.S_ISREG(status.st_mode) => stat.S_ISSOCK(status.st_mode)",
        _FUZZ_CONFIG + "test_the_command_exits_with_2_and_an_error_for_anything_but_a_config_file",
    ),
    Fault(
        "a duplicate key of a JSON object is accepted",
        "meshrl/core/files.py::_object",
        "len(made) != len(pairs) => len(made) > len(pairs)",
        _FUZZ_DATA + "test_an_invalid_row_is_reported_with_its_line",
    ),
    Fault(
        "a line without an end is read without a limit",
        "meshrl/core/files.py::lines_of",
        "file.readline(MAX_LINE_BYTES + 1) => file.readline()",
        _FUZZ_DATA + "test_a_line_above_the_limit_is_not_read_to_its_end",
    ),
    Fault(
        "seeds do not depend on the sample's index",
        "meshrl/core/types.py::turn_seed",
        "(ordinal, index, turn) => (ordinal, turn)",
        "tests/unit/agent/test_agents.py::test_seeds_follow_run_ordinal_index_and_turn_and_nothing_else",
    ),
]
