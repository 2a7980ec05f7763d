"""A pickle runs code when it is read. So meshrl reads pickles in few places, each with a sender that it trusts, and no
collective of torch.distributed, whose connections are not authenticated, carries one."""

import ast
from collections.abc import Iterator

import pytest
from source_tree import ROOT, name_of, python_files, syntax

READERS = {  # file -> the process that has written the pickle
    "meshrl/process/frames.py": "a child, the parent, or a process that has proven that it knows the run's token",
    "meshrl/reward/kinds.py": "the parent of a reward worker, over a socket pair",
    "meshrl/cluster/worker.py": "this process: a test of whether an error can be pickled",
}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
METHODS = {"load", "loads", "Unpickler", "open"}
CODE_SWITCHES = {"allow_pickle", "trust_remote_code"}  # arguments that let a library run code of a file


def faults_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that reads a pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                if alias.name in METHODS:
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.name in OBJECT_COLLECTIVES or (alias.asname and alias.name in MODULES):
                    yield node.lineno, f"import {alias.name} as {alias.asname}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in OBJECT_COLLECTIVES or (owner in MODULES and node.attr in METHODS):
                yield node.lineno, node.attr
            elif owner == "torch" and node.attr == "load":
                yield node.lineno, "torch.load"
        elif isinstance(node, ast.Call) and _may_run_code_of_a_model(node):
            yield node.lineno, "a call of Transformers without trust_remote_code=False, which asks the user"
        elif isinstance(node, ast.keyword) and node.arg in CODE_SWITCHES and ast.unparse(node.value) != "False":
            yield node.value.lineno, node.arg


def _may_run_code_of_a_model(call: ast.Call) -> bool:
    name, _, method = ast.unparse(call.func).rpartition(".")
    is_auto = name.rpartition(".")[2].startswith("Auto") and method in ("from_pretrained", "from_config")
    keywords = {keyword.arg for keyword in call.keywords}
    return (is_auto or (method == "pipeline" and not name)) and "trust_remote_code" not in keywords


def test_no_call_of_transformers_can_ask_whether_to_run_code_of_a_model():
    faults = [
        f"{name_of(path)}:{node.lineno}"
        for path in python_files("meshrl", "examples", "benchmarks", "scripts")
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Call) and _may_run_code_of_a_model(node)
    ]
    assert faults == [], "pass trust_remote_code=False"


def test_pickles_are_read_only_where_their_sender_is_trusted():
    faults = [
        f"{name_of(path)}:{line}: {what}"
        for path in python_files("meshrl")
        if name_of(path) not in READERS
        for line, what in faults_in(syntax(path))
    ]
    assert faults == [], "send JSON or arrays (parallel/exchange.py, process/frames.py)"


def test_no_exception_outlives_its_reason():
    for name, sender in READERS.items():
        assert sender and list(faults_in(syntax(ROOT / name))), name


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_gather_object(out, value)",
        "torch.distributed.broadcast_object_list(x)",
        "from torch.distributed import recv_object_list",
        "pickle.loads(data)",
        "pickle.Unpickler(file).load()",
        "from pickle import loads",
        "import pickle as p",
        "cloudpickle.load(file)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trust)",
        "AutoConfig.from_pretrained(path)",
        "transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)",
        "pipeline('text-generation', path)",
    ],
)
def test_the_rule_finds_each_way_to_read_a_pickle(code: str):
    assert len(list(faults_in(ast.parse(code)))) >= 1


def test_the_rule_allows_to_write_pickles_and_to_read_other_data():
    allowed = "import pickle\npickle.dumps(x)\njson.loads(x)\nnp.load(path)\ncloudpickle.dumps(f)\nyaml.safe_load(x)"
    assert list(faults_in(ast.parse(allowed))) == []
