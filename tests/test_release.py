"""What a release is made of: the wheel, the sdist, and what files beside the package say about it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lightning_odc import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built as `make package` builds them."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_wheel_is_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"lightning_odc-{__version__}.dist-info/METADATA").decode()
        commands = wheel.read(f"lightning_odc-{__version__}.dist-info/entry_points.txt").decode()
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lightning_odc").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = {f"lightning_odc-{__version__}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")}
    about |= {
        f"lightning_odc-{__version__}.dist-info/{name}" for name in ("entry_points.txt", "licenses/LICENSE")
    }
    assert len(sources) > 100
    assert "lightning_odc/py.typed" in names
    assert names == sources | about
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "lightning-odc = lightning_odc.cli:main" in commands


@pytest.mark.slow
def test_the_sdist_has_what_tests_and_site_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    folders = {"lightning_odc", "tests", "benchmarks", "docs", "examples", "notebooks"}
    files = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"}
    files |= {"PKG-INFO"}
    files |= {"pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml"}
    assert {name.partition("/")[0] for name in names} - {".gitignore"} == folders | files
    wanted = ["tests/support/ranks.py", "docs/data/bench-train.json", "notebooks/src/ruff.toml"]
    assert {*wanted, "docs/website/overrides/main.html", "docs/assets/logo.svg"} <= names
    left = re.compile(r"__pycache__|\.pyc$|^(site|build|dist)/|lightning_logs")
    assert [name for name in names if left.search(name)] == []


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "lightning_odc/__init__.py"):
        assert __version__ not in (ROOT / name).read_text(), name


def parsed(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


def test_ci_runs_the_pythons_that_classifiers_name() -> None:
    jobs = parsed(WORKFLOWS / "ci.yml")["jobs"]
    tested = {step["with"]["python-version"] for step in jobs["run"]["steps"] if "with" in step}
    tested |= {*jobs["pythons"]["strategy"]["matrix"]["python"]}
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert {*named} <= tested
    assert f">={min(named, key=lambda version: int(version[2:]))}" == PROJECT["requires-python"]


def test_what_a_workflow_installs_is_pinned() -> None:
    for path in (*WORKFLOWS.glob("*.yml"), ROOT / ".readthedocs.yaml"):
        pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
        assert parsed(path)
        for line in re.findall(r"pip install (.*)", path.read_text()):
            assert "-c constraints.txt" in line
            asked = re.sub(r"#.*|-c constraints\.txt|\[python\]", "", line)
            assert [name for name in re.findall(r"[a-z][\w-]+", asked) if name not in pinned] == []


def test_the_citation_names_the_software_and_the_paper() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["authors"] == [{"name": "lightning-odc contributors"}] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert paper["url"] == "https://arxiv.org/abs/2601.19362"
    assert len(paper["authors"]) == 6
