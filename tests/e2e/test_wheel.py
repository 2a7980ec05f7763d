"""The wheel that is built from a clean tree has everything that its commands need, and nothing else."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from meshrl.api import __version__

ROOT = Path(__file__).parents[2]
EXTRAS = ("agents", "dev", "gguf", "ray", "trackers", "vision")
EXAMPLES = ("guided_run.py", *(f"quickstart/{name}" for name in ("quickstart.py", "task.py", "grpo.yaml", "reward.py")))


def tracked() -> list[str]:
    """The files of the repository, with new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no clone of the repository")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def built(tree: Path, out: Path, kind: str) -> Path:
    """The sdist or the wheel of a tree, made by its build backend without a network."""
    out.mkdir()
    code = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist of a copy of the tracked files, as on a machine that has neither."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if name == "docs/faq.md" or not name.startswith(("tests/", "docs/", "benchmarks/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "tree" / name)
    with tarfile.open(built(folder / "tree", folder / "sdist", "sdist")) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    return built(tree, folder / "wheel", "wheel")


def test_the_wheel_has_every_file_of_the_package_and_of_the_quickstart(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    own = [name for name in names if name.startswith("meshrl/")]
    assert sorted(own) == sorted(name for name in tracked() if name.startswith("meshrl/"))
    data = f"meshrl-{__version__}.data/data/share/meshrl/"
    assert {f"{data}docs/faq.md", *(f"{data}examples/{name}" for name in EXAMPLES)} <= {*names}
    others = [name for name in names if not name.startswith(("meshrl/", data, f"meshrl-{__version__}.dist-info/"))]
    assert not others


def test_its_metadata_has_the_requirement_files_as_extras(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        info = f"meshrl-{__version__}.dist-info/"
        metadata = message_from_string(file.read(f"{info}METADATA").decode())
        scripts = configparser.ConfigParser()
        scripts.read_string(file.read(f"{info}entry_points.txt").decode())
        assert f"{info}licenses/LICENSE" in file.namelist()
    assert metadata["Version"] == __version__ and metadata["Requires-Python"] == ">=3.11"
    assert scripts["console_scripts"]["meshrl"] == "meshrl.cli:main"
    assert sorted(metadata.get_all("Provides-Extra")) == sorted(EXTRAS)
    wanted = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    for extra in ("", *EXTRAS):
        file = ROOT / f"requirements{'-' * bool(extra)}{extra}.txt"
        lines = (re.sub(r"\s*#.*", "", line) for line in file.read_text().splitlines())
        listed = {str(Requirement(line)) for line in lines if line}
        found = [need for need in wanted if ("extra ==" in str(need.marker)) == bool(extra)]
        found = [need for need in found if need.marker is None or need.marker.evaluate({"extra": extra})]
        assert {str(need).partition(";")[0].strip() for need in found} == listed, extra
    (section,) = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")][:1]
    assert section.startswith(f"## [{__version__}]")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_alone_runs_the_quickstart_and_a_run_of_ones_own(wheel: Path, tmp_path: Path):
    """In a folder without the repository, whose packages are this environment's."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, *words], check=True)
    env = {name: value for name, value in os.environ.items() if name != "MESHRL_DEVICE"} | {"PYTHONPATH": str(site)}

    def meshrl(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "meshrl", *words],
            cwd=here,
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{words}: {(done.stdout + done.stderr)[-3000:]}"
        return done.stdout + done.stderr

    assert f"meshrl {__version__}" in meshrl("--version")
    printed = meshrl("quickstart", "--smoke")
    assert "MESHRL_DEVICE=cuda meshrl quickstart" in printed and "[5/5]" in printed
    seed = here / "runs" / "quickstart" / "seed_0"
    assert json.loads((seed / "report.json").read_text())["steps"] == 2
    meshrl("init", "my", "--data", str(seed / "start" / "train.jsonl"), "--model", str(seed / "sft"))
    meshrl("train", "my/config.yaml", "run.name=first", "loop.num_steps=1", "data.eval_limit=8")
    assert meshrl("chat", "runs/first", "2*31415", "temperature=0", "max_new_tokens=4")
    meshrl("view", "runs/first")
    assert (here / "runs" / "first" / "view.html").is_file()
    where = subprocess.run(
        [sys.executable, "-c", "import meshrl; print(meshrl.__file__)"],
        cwd=here,
        env=env,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(site))
