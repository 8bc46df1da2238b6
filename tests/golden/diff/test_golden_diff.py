"""Pairs of configurations, and the output of `interlingua diff` for each.

To rewrite one: interlingua diff OLD NEW > told.txt, and read it.
"""

from functools import cache
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.config.diff import ConfigDiff, diff_configs
from gateway.config.loader import load_config

HERE = Path(__file__).parent
PAIRS = sorted(path.parent for path in HERE.glob("*/told.txt"))
SECRETS = ("canary-one", "canary-two", "1111", "3333")
every_pair = pytest.mark.parametrize("folder", PAIRS, ids=lambda path: path.name)


def run_diff(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and its output."""
    result = CliRunner().invoke(
        main, ["diff", f"{folder}/old.yaml", f"{folder}/new.yaml", *arguments]
    )
    return result.exit_code, result.output


@cache
def diff_pair(folder: Path, before: str = "old", after: str = "new") -> ConfigDiff:
    return diff_configs(*(load_config(f"{folder}/{name}.yaml", env={}) for name in (before, after)))


@every_pair
def test_diff_output_of_each_pair(folder: Path) -> None:
    code, output = run_diff(folder)
    expected = (folder / "told.txt").read_text("utf-8")

    assert output.replace(f"{folder}/", "") == expected
    assert code == (0 if folder.name == "nothing" else 1)
    assert not any(secret in output for secret in SECRETS)


@every_pair
def test_json_diff_output_matches_the_diff_object(folder: Path) -> None:
    code, output = run_diff(folder, "--json")
    assert msgspec.json.decode(output, type=ConfigDiff) == msgspec.json.decode(
        msgspec.json.encode(diff_pair(folder)), type=ConfigDiff
    )
    assert code == (0 if folder.name == "nothing" else 1)
    assert not any(secret in output for secret in SECRETS)


@every_pair
def test_reversed_diff_is_symmetric(folder: Path) -> None:
    """In reverse, the same names differ, and as many users move back."""
    there, back = diff_pair(folder), diff_pair(folder, "new", "old")
    assert there.sections == back.sections

    for kind, changes in there.names.items():
        returned = back.names[kind]
        assert (changes.added, changes.removed) == (returned.removed, returned.added)
        assert set(changes.changed) == set(returned.changed)
    moves = {one.model: (one.before, one.after, one.moved) for one in there.traffic}
    returns = {one.model: (one.after, one.before, one.moved) for one in back.traffic}

    assert moves == returns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {backend: one}}\n", "new.yaml:1:1: 'backends' is missing; add it"),
        (None, "new.yaml:1:1: the file can't be read: No such file or directory"),
    ],
    ids=["wrong", "missing"],
)
def test_invalid_file_has_its_own_exit_code_and_message(
    tmp_path: Path, text: str | None, message: str
) -> None:
    (tmp_path / "old.yaml").write_text((HERE / "nothing/old.yaml").read_text("utf-8"))
    if text is not None:
        (tmp_path / "new.yaml").write_text(text)

    code, output = run_diff(tmp_path)

    assert code == 2
    assert output == f"{tmp_path}/{message}\n"
