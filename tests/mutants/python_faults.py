"""Faults of the Python API: objects that are silently ignored, and runs that end in a wrong way."""

from __future__ import annotations

from fault import Fault

_API = "tests/e2e/test_python_api.py::"
_DICT = "tests/unit/config/test_config_dict.py::"
_LOOP = "tests/unit/run/test_own_loop.py::"
_ROWS = "tests/unit/data/test_rows_in_memory.py::"

PYTHON_FAULTS = [
    Fault(
        "the import of a subpackage replaces meshrl.train",
        "meshrl/__init__.py",
        "from meshrl import train as _subpackage",
        "from meshrl import sync as _subpackage",
        (_API + "test_imports_of_subpackages_do_not_replace_the_functions_of_the_package",),
    ),
    Fault(
        "a value of the config that a Python object replaces is silently ignored",
        "meshrl/config/load.py",
        "            problems.append(Problem((key,), text, value.origin))",
        "            pass",
        (_DICT + "test_an_object_replaces_no_value_of_the_config",),
    ),
    Fault(
        "the notebook's task is not restored after a run",
        "meshrl/run/watchdog.py",
        "            asyncio._enter_task(loop, task)",
        "            pass",
        (_LOOP + "test_inside_a_running_loop_a_run_has_another_loop_in_the_same_thread",),
    ),
    Fault(
        "a run that on_step ends is not evaluated",
        "meshrl/loops/evaluate.py",
        "job.step == 0 or job.is_over or",
        "job.step in (0, job.cfg.loop.num_steps) or",
        (_API + "test_false_from_on_step_ends_the_run_as_after_its_last_step",),
    ),
    Fault(
        "a run that on_step ends writes no model",
        "meshrl/run/live.py",
        "if with_model and (job.is_over or",
        "if with_model and (job.step == self.num_steps or",
        (_API + "test_false_from_on_step_ends_the_run_as_after_its_last_step",),
    ),
    Fault(
        "an evaluation calls on_step as if it were a step",
        "meshrl/run/inputs.py",
        "            return\n",
        "",
        (_API + "test_false_from_on_step_ends_the_run_as_after_its_last_step",),
    ),
    Fault(
        "a run resumes with other rows in memory",
        "meshrl/data/order.py",
        'total.update(name.encode() + b"\\0" + (b"" if ids is None else ids.tobytes()) + b"\\0")',
        'total.update(name.encode() + b"\\0")',
        (_ROWS + "test_a_resume_with_other_rows_is_refused",),
    ),
]
