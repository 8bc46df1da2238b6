"""The allowed versions of torch and transformers are those that are tested."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_no_version_after_the_tested_one_is_accepted(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = map(Requirement, extras["optional-dependencies"]["torch"])
    accepted = next(one.specifier for one in requirements if one.name == name)
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    tested = Version(next(line for line in lines if line.startswith(f"{name}=="))[len(name) + 2 :])

    assert tested in accepted
    assert f"{tested.major}.{tested.minor}.99" in accepted
    assert f"{tested.major}.{tested.minor + 1}" not in accepted
