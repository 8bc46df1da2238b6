"""The wheel contains the files of the checkout, and nothing that runs by itself."""

import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.pins import is_installable, select_hashes, write_hashes

ROOT = Path(__file__).parents[2]
PACKAGES = {"gateway", "backends", "protocols"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    builder = WheelBuilder(str(ROOT))
    [path] = builder.build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_wheel_contains_exactly_the_files_of_the_checkout(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == PACKAGES
    for name in names:
        assert wheel.read(name) == (ROOT / name).read_bytes(), name
    assert not [name for name in wheel.namelist() if name.endswith(".pth")]


def test_wheel_installs_exactly_one_command(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = [line for line in wheel.read(entry_points).decode().splitlines() if line]
    assert lines == ["[console_scripts]", "interlingua = gateway.cli:main"]

    about = {name.rpartition("/")[2] for name in wheel.namelist() if ".dist-info/" in name}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE"}


def test_every_constraint_pins_a_version() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    loose = [one for one in lines if one and not one.startswith("#") and "==" not in one]
    assert loose == []


@pytest.mark.parametrize(
    "file",
    [
        "deploy/requirements.txt",
        "deploy/ray/requirements.txt",
        "tests/clients/requirements.txt",
        "tests/deploy/helm.txt",
        "tests/deploy/requirements.txt",
        "tests/oracle/requirements.txt",
    ],
)
def test_requirements_without_dependency_resolution_have_hashes(file: str) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text("utf-8"))
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]

    assert pins
    assert [
        line for line in pins if not re.search(r"==\S+ [^-]*--hash=sha256:[0-9a-f]{64}", line)
    ] == []


def test_hashes_are_selected_for_wheels_of_the_pinned_version() -> None:
    files = {
        "some_name-1.2-py3-none-any.whl": "a" * 64,
        "some_name-1.2-cp311-cp311-manylinux_2_28_x86_64.whl": "b" * 64,
        "some_name-1.2-cp310-cp310-manylinux_2_28_x86_64.whl": "c" * 64,
        "some_name-1.2-cp314-cp314t-manylinux_2_28_x86_64.whl": "d" * 64,
        "some_name-1.2-cp311-cp311-win_amd64.whl": "e" * 64,
        "some_name-1.20-py3-none-any.whl": "f" * 64,
        "some_name-1.2.tar.gz": "0" * 64,
    }

    assert select_hashes(files, "1.2") == ["a" * 64, "b" * 64]
    assert is_installable("x-1-cp39-abi3-macosx_11_0_arm64.whl")


def test_written_hashes_replace_existing_ones() -> None:
    old = f"# why\nx==1 \\\n    --hash=sha256:{'0' * 64}\n"
    new = write_hashes(old, {("x", "1"): ["1" * 64, "2" * 64]})

    assert new == (
        f"# why\nx==1 \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{'2' * 64}\n"
    )
    assert write_hashes(new, {("x", "1"): ["1" * 64, "2" * 64]}) == new
