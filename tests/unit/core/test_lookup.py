"""From a name in the config to its function: an entry of a table, or a function in a user's module."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from meshrl.core.errors import ConfigError
from meshrl.core.lookup import can_be_imported, code_of, look_up, similar_names

TABLE = {"grpo": 1, "rloo": 2}


def test_a_name_is_an_entry_of_the_table_or_a_dotted_path():
    assert look_up("rloo", TABLE, "algo.advantage") == 2
    assert look_up("math:sqrt", TABLE, "algo.advantage") is math.sqrt
    assert look_up("pathlib:Path.cwd", TABLE, "algo.advantage") == Path.cwd


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpro", "algo.advantage is 'gpro'; allowed: grpo, rloo, or a dotted path package.module:name; did you mean"),
        ("no_such_module:f", "algo.advantage is 'no_such_module:f': importing 'no_such_module' raised ModuleNotFound"),
        ("math:sqr", "has no 'sqr'; did you mean 'sqrt'?"),
        ("pathlib:Path.cwdd", "has no 'Path.cwdd'"),
    ],
)
def test_a_missing_object_is_a_config_error_that_names_the_key(name: str, message: str):
    with pytest.raises(ConfigError) as error:
        look_up(name, TABLE, "algo.advantage")
    assert message in str(error.value)


def test_a_module_of_the_working_folder_is_found_when_sys_path_does_not_contain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A console script has its own folder at the head of sys.path, not the working folder."""
    (tmp_path / "lookup_module_of_a_test.py").write_text("def f(): return 7\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert look_up("lookup_module_of_a_test:f", {}, "algo.advantage")() == 7


def test_the_code_of_a_function_is_its_module_without_comments_and_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is read from the file, because a run may have imported an earlier text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module, name = tmp_path / "code_module_of_a_test.py", "code_module_of_a_test:f"
    texts = ["B = 1\ndef f(x): return x + B\n", "# changed\nB = 1\n\ndef f(x):\n    return (x + B)\n"]
    texts += ["B = 2\ndef f(x): return x + B\n", "def f(x:"]
    found = [code_of(name) for text in texts if module.write_text(text)]
    assert found[0] == found[1] != found[2] and found[3] == texts[3]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)  # a script has none
    assert code_of("no_module_of_a_test:f") == "" == code_of("__main__:f")
    assert code_of("math:sqrt") == "" and code_of("format")  # the version of meshrl

    def given(x: int) -> int:
        return x + 1  # a comment

    assert code_of(name, given) == "def given(x: int) -> int:\n    return x + 1" and code_of(name, math.sqrt) == ""


@pytest.mark.parametrize("code", ["raise OSError('no disk')", "import sys; sys.exit(3)"])
def test_a_module_that_fails_when_it_is_imported_is_a_config_error(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "lookup_module_that_fails.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing 'lookup_module_that_fails' raised"):
        look_up("lookup_module_that_fails:f", {}, "algo.advantage")


def test_similar_names_come_best_first_whatever_their_case():
    assert similar_names("Bfloat16", ["float32", "bfloat16", "float16"], 2) == ["bfloat16", "float16"]
    assert similar_names("full_shard", ["FULL_SHARD", "NO_SHARD"], 1) == ["FULL_SHARD"]
    assert similar_names("x", ["FULL_SHARD"]) == []


def test_a_module_can_be_imported_when_its_package_is_installed_or_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert can_be_imported("json.decoder:JSONDecoder") and not can_be_imported("lookup_of_nothing:f")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lookup_of_nothing.py").touch()
    assert can_be_imported("lookup_of_nothing:f")
