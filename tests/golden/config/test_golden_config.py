"""Invalid configuration files give the errors beside them; valid ones load.

In the errors, ``{protocols}`` stands for the names of the registry in their order, and
``{protocols by name}`` for the same in that of the alphabet.
"""

from pathlib import Path

import pytest

from gateway.admin.config_view import dump_config
from gateway.config.errors import ConfigError
from gateway.config.loader import load_text
from gateway.config.schema import Config
from protocols import PROTOCOLS

HERE = Path(__file__).parent
WRONG = sorted((HERE / "wrong").glob("*.yaml"))
GOOD = sorted((HERE / "good").glob("*.yaml"))
SECRETS = ("canary-password", "canary-from-the-environment", "token-from-a-file")
ENV = {
    "PORT": "8000",
    "NUMBER": "4096",
    "WORD": "tea",
    "EMPTY": "",
    "SECRET": "canary-from-the-environment",
}


def read_expected_errors(path: Path) -> list[str]:
    text = path.with_suffix(".txt").read_text("utf-8")
    text = text.replace("{protocols}", ", ".join(PROTOCOLS))
    return text.replace("{protocols by name}", ", ".join(sorted(PROTOCOLS))).splitlines()


def read_config(path: Path) -> Config:
    return load_text(path.read_text("utf-8"), str(path), env=ENV)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_invalid_file_reports_every_error(path: Path) -> None:
    with pytest.raises(ConfigError) as excinfo:
        read_config(path)

    messages = str(excinfo.value).replace(f"{path.parent}/", "")
    assert messages.splitlines() == read_expected_errors(path)
    assert not any(secret in messages for secret in SECRETS)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_valid_file_is_accepted_and_shows_no_secrets(path: Path) -> None:
    config = read_config(path)
    assert config.models

    shown = f"{config!r} {dump_config(config)}"
    assert not any(secret in shown for secret in SECRETS)


def test_each_invalid_file_has_its_expected_errors() -> None:
    complaints = {path.stem for path in (HERE / "wrong").glob("*.txt")}
    assert complaints == {path.stem for path in WRONG}
    assert len(WRONG) >= 45
    assert len(GOOD) >= 8
