"""What is installed is what lies in the checkout, and nothing that starts by itself."""

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
OURS = {"gateway", "backends", "protocols"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    builder = WheelBuilder(str(ROOT))
    [made] = builder.build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(made)


def test_the_wheel_holds_the_files_of_the_checkout_and_no_others(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == OURS
    for name in names:
        assert wheel.read(name) == (ROOT / name).read_bytes(), name
    assert not [name for name in wheel.namelist() if name.endswith(".pth")]


def test_the_wheel_brings_one_command_and_no_other_way_in(wheel: zipfile.ZipFile) -> None:
    [told] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = [line for line in wheel.read(told).decode().splitlines() if line]
    assert lines == ["[console_scripts]", "interlingua = gateway.cli:main"]
    about = {name.rpartition("/")[2] for name in wheel.namelist() if ".dist-info/" in name}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"}


def test_every_release_that_is_installed_is_named() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    loose = [one for one in lines if one and not one.startswith("#") and "==" not in one]
    assert loose == []
