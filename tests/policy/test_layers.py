"""A package imports only packages of a strictly lower level, and each third-party library only in its home."""

import subprocess
import sys
from pathlib import Path

from source_tree import ROOT, imports, name_of, python_files

LEVELS = {
    "core": 0,
    **dict.fromkeys(("config", "process"), 1),
    **dict.fromkeys(("monitor", "plan"), 2),
    **dict.fromkeys(("algo", "reward", "data", "parallel"), 3),
    **dict.fromkeys(("model", "sync"), 4),
    **dict.fromkeys(("train", "rollout"), 5),
    "agent": 6,
    "cluster": 7,
    "loops": 8,
    "run": 9,
    "tools": 10,
    "api": 11,
    "cli_options": 11,
    "cli": 12,
    "__main__": 13,
}

EVERYWHERE = {"numpy"}
MODEL_CHECK = {f"tools/model_check/{name}.py" for name in ("checks", "command", "small_model")}
HOMES: dict[str, set[str]] = {  # library -> packages or files of meshrl that may import it
    "xxhash": {"sync"},
    # imported where `has_triton` holds
    "triton": {"model/kernels.py", "rollout/embedded/kernels.py", "sync/kernels.py"},
    "orjson": {"monitor"},
    "torch": {
        "core/batch.py",
        "core/device.py",
        "algo",
        "parallel",
        "model",
        "sync",
        "train",
        "rollout",
        "cluster",
        "loops",
        "monitor/trackers.py",  # SummaryWriter
        *MODEL_CHECK,
    },
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "yaml": {"config"},
    "math_verify": {"reward"},
    "sympy": {"reward"},
    "cloudpickle": {"reward"},
    "transformers": {"data", "model", "agent/parsing.py", "tools/doctor/tiny_task.py", *MODEL_CHECK},
    "packaging": {"tools/doctor/facts.py"},
    "huggingface_hub": {"data", "model"},
    "jinja2": {"data"},
    "mcp": {"agent/mcp.py"},
    "bm25s": {"agent/search.py"},
    "PIL": {"data"},
    "safetensors": {"model"},
    "peft": {"model"},
    "gguf": {"model/gguf.py"},
    "datasets": {"data"},
    "pyarrow": {"data", "monitor"},
    "pandas": {"api.py"},
    **{name: {"monitor"} for name in ("wandb", "mlflow", "swanlab", "trackio", "prometheus_client")},
    "rich": {"tools", "monitor"},
    "psutil": {"monitor", "process"},
    "ray": {"cluster/ray.py"},
    "starlette": {"agent/endpoint/server.py"},
    "uvicorn": {"agent/endpoint/server.py"},
    "httpx2": {"rollout/server/http.py", "reward/judge.py"},
    "vllm": {
        "rollout/vllm/memory.py",
        "rollout/vllm/packed.py",
        "rollout/vllm/worker.py",
    },
}

EXCEPTIONS: dict[tuple[str, str], str] = {  # (file, imported module) -> why it is allowed
}

TORCH_FREE = ["meshrl.cli", "meshrl.__main__", "meshrl.core.types", "meshrl.core.errors"]
TORCH_FREE_PACKAGES = ["config", "process", "reward"]


def _inside(path: Path) -> str:
    return path.relative_to(ROOT / "meshrl").as_posix()


def _package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer_faults() -> list[str]:
    """Imports of a package from a level that is not strictly lower."""
    faults = []
    for path in python_files("meshrl"):
        here = _inside(path).split("/")[0].removesuffix(".py")
        if here == "__init__":
            continue
        for module, line in imports(path):
            there = _package(module)
            if module.split(".")[0] != "meshrl" or there == here or (_inside(path), module) in EXCEPTIONS:
                continue
            if here not in LEVELS or there not in LEVELS:
                faults.append(f"{name_of(path)}:{line}: {here} or {there} has no level; add it to LEVELS")
            elif LEVELS[there] >= LEVELS[here]:
                faults.append(
                    f"{name_of(path)}:{line}: {here} (level {LEVELS[here]}) imports {module} (level {LEVELS[there]})"
                )
    return faults


def home_faults() -> list[str]:
    """Imports of a third-party library outside its home."""
    faults = []
    for path in python_files("meshrl"):
        for module, line in imports(path):
            library, inside = module.split(".")[0], _inside(path)
            if library in sys.stdlib_module_names or library in EVERYWHERE or library == "meshrl":
                continue
            if not {inside, inside.split("/")[0]} & HOMES.get(library, set()) and (inside, library) not in EXCEPTIONS:
                homes = ", ".join(sorted(HOMES.get(library, set()))) or "nowhere: add the library to HOMES"
                faults.append(f"{name_of(path)}:{line}: imports {library}, whose home is {homes}")
    return faults


def test_a_package_imports_only_packages_of_a_strictly_lower_level():
    assert layer_faults() == []


def test_a_library_is_imported_only_in_its_home():
    assert home_faults() == []


def test_no_exception_outlives_its_reason():
    used = {
        (_inside(path), module if module.startswith("meshrl") else module.split(".")[0])
        for path in python_files("meshrl")
        for module, _ in imports(path)
    }
    assert set(EXCEPTIONS) <= used and all(EXCEPTIONS.values())


def test_the_package_imports_no_tests_or_examples():
    """They are not part of the wheel."""
    outside = {"tests", "examples", "benchmarks", "scripts", "conftest"}
    assert [(name_of(p), m) for p in python_files("meshrl") for m, _ in imports(p) if m.split(".")[0] in outside] == []


def test_modules_that_must_start_fast_import_without_torch():
    """In a process where importing torch or Transformers fails, so that the traceback names the import."""
    files = [p for package in TORCH_FREE_PACKAGES for p in python_files(f"meshrl/{package}") if p.name != "__init__.py"]
    modules = [*TORCH_FREE, *(name_of(path).removesuffix(".py").replace("/", ".") for path in files)]
    code = "import sys, importlib\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_the_standard_library_only():
    """`meshrl --help` must not wait for pydantic either."""
    code = "import sys, meshrl.cli\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    third_party = {
        name
        for name in done.stdout.split()
        if name not in sys.stdlib_module_names and name not in ("meshrl", "__main__")
    }
    assert third_party == set()
