"""Requests and their explanations; EXPLAIN_REWRITE=1 rewrites the files."""

import os
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gateway.cli.explain import explain_command

HERE = Path(__file__).parent
CASES: dict[str, str] = yaml.safe_load((HERE / "cases.yaml").read_text("utf-8"))
REFUSED = {
    "key-missing",
    "key-not-good-for-it",
    "losses-rejected",
    "model-unknown",
    "not-json",
    "over-a-limit",
    "path-unknown",
}
FORMS = [("txt", []), ("json", ["--json"])]


@pytest.mark.parametrize(("form", "flags"), FORMS, ids=[form for form, _ in FORMS])
@pytest.mark.parametrize("name", CASES)
def test_explanation_output_of_each_request(
    monkeypatch: pytest.MonkeyPatch, name: str, form: str, flags: list[str]
) -> None:
    monkeypatch.chdir(HERE)

    result = CliRunner().invoke(
        explain_command, ["gateway.yaml", *shlex.split(CASES[name]), *flags]
    )

    file = HERE / "expected" / f"{name}.{form}"
    if os.environ.get("EXPLAIN_REWRITE"):
        file.write_text(result.output, "utf-8")

    assert result.output == file.read_text("utf-8")
    assert result.exit_code == (1 if name in REFUSED else 0)
    assert "canary" not in result.output


def test_every_expected_output_belongs_to_a_case() -> None:
    names = {file.stem for file in (HERE / "expected").iterdir()}

    assert names == CASES.keys()
