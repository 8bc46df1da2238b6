"""Every configuration under deploy/ is valid."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from tests.deploy.tools import DEPLOY, ROOT, read_yaml

DIGESTS = {"INTERLINGUA_KEY_SHA256": "a" * 64, "INTERLINGUA_ADMIN_SHA256": "b" * 64}
PLACES = (DEPLOY / "compose", DEPLOY / "kubernetes")
FILES = [
    str(path.relative_to(ROOT))
    for place in PLACES
    for path in sorted(place.rglob("*.yaml"))
    if "listeners:" in path.read_text("utf-8")
]


def test_all_deploy_configurations_are_found() -> None:
    assert len(FILES) == 4


@pytest.mark.parametrize("file", FILES)
def test_deploy_configuration_is_valid(file: str) -> None:
    path = ROOT / Path(file)
    keys = read_yaml(path).get("keys")
    arguments = ["check", str(path)] if keys else ["check", "--insecure-no-auth", str(path)]

    result = CliRunner().invoke(main, arguments, env=DIGESTS)

    assert result.exit_code == 0, result.output
