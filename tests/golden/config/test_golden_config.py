"""Whole files: the wrong ones beside every complaint they bring, and the good ones."""

from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import dump_config, load_text
from gateway.config.schema import Config

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


def read_config(path: Path) -> Config:
    return load_text(path.read_text("utf-8"), str(path), env=ENV)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_invalid_file_reports_every_error(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    messages = str(caught.value).replace(f"{path.parent}/", "")
    assert messages.splitlines() == path.with_suffix(".txt").read_text("utf-8").splitlines()
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
