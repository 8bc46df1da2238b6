"""A mistaken value of an option is a wrong usage that names the option, in every command."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.cli.option_types import SENT_KEY
from gateway.cli.probe import _read_key

WORKER = "http://127.0.0.1:1"
PROBE = ["probe", WORKER, "--protocol", "openai", "--model", "m"]
MISTAKES = [
    (["serve", WORKER, "--log-level", "loud"], "'--log-level': 'loud' is not one of 'debug'"),
    (["worker", "--model", "m", "--log-level", "7"], "'--log-level': '7' is not one of 'debug'"),
    (["explain", "FILE", "--random", "nan"], "'--random': nan is not a number"),
    (["ab", "FILE", "--model", "m", "--confidence", "nan"], "'--confidence': nan is not a number"),
    (["ab", "FILE", "--model", "m", "--difference", "nan"], "'--difference': nan is not a number"),
    (["compare", "FILE", "FILE", "--confidence", "nan"], "'--confidence': nan is not a number"),
    (["replay", "FILE", "--prices", "1", "nan"], "'--prices': nan is not a number"),
    (["replay", "FILE", "--prices", "inf", "1"], "'--prices': inf is not a number"),
    (["replay", "FILE", "--max-cost", "inf"], "'--max-cost': inf is not a number"),
    ([*PROBE, "--timeout", "nan"], "'--timeout': nan is not a number"),
    ([*PROBE, "--key", "a\nb"], "'--key': the key is empty, or contains spaces or characters"),
    ([*PROBE, "--key-file", "FILE"], "the key is empty, or contains spaces"),
    ([*PROBE, "--ca", "FILE"], "--ca: FILE holds no certificates in PEM"),
    (["explain", WORKER, "--id", "1", "--admin-key", "ключ"], "'--admin-key': the key is empty"),
    (["ab", WORKER, "--model", "m", "--key", "ключ"], "'--key': the key is empty, or contains"),
    (["replay", "FILE", "--to", WORKER, "--worker-key", "ключ"], "'--worker-key': the key is"),
    (["compare", "nowhere"], "no such recording: nowhere"),
    (["probe", "http://127.0.0.1:99999", "--protocol", "openai"], "99999 is not a URL"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES]
)
def test_mistaken_value_is_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("a text of several words\n")

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 2
    assert message in result.stderr


def test_key_is_sent_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")

    assert SENT_KEY.convert("sk-1", None, None) == f"{_read_key(file)}" == "sk-1"
