"""``interlingua keys``: what it makes is a key that the gateway knows again."""

import hashlib
import json
import re

import pytest
from click.testing import CliRunner, Result

from gateway.auth.api_keys import Authenticator, Principal
from gateway.cli import main
from gateway.config.loader import load_text

CONFIG = """\
listeners: [{address: "0.0.0.0:8000", protocols: [openai]}]
backends: {e: {kind: echo}}
models: {m: {backend: e}}
"""


def run_keys_new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["keys", "new", *arguments])


def test_printed_configuration_lines_authenticate_the_new_key() -> None:
    result = run_keys_new("--name", "web-app")
    assert result.exit_code == 0
    key, empty, lines = result.stdout.split("\n", 2)
    assert empty == ""
    assert key not in lines
    assert key not in result.stderr

    [known] = load_text(CONFIG + lines, "gateway.yaml", env={}).keys

    assert known.name == "web-app"
    keyring = Authenticator([Principal(known.name, known.sha256)])
    found = keyring.authenticate({"authorization": f"Bearer {key}"})
    assert found is not None
    assert found.name == "web-app"


def test_json_output_contains_name_key_and_digest() -> None:
    result = run_keys_new("--name", "web-app", "--json")
    told = json.loads(result.stdout)
    assert result.stderr == ""
    assert set(told) == {"name", "key", "sha256"}
    assert told["name"] == "web-app"
    assert told["sha256"] == hashlib.sha256(told["key"].encode()).hexdigest()


def test_keys_are_random_and_have_the_product_prefix() -> None:
    keys = {json.loads(run_keys_new("--json").stdout)["key"] for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"il-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_default_key_name_is_derived_from_the_digest() -> None:
    told = json.loads(run_keys_new("--json").stdout)
    assert told["name"] == f"key-{told['sha256'][:8]}"


@pytest.mark.parametrize("name", ["", "a b", "a" * 101, "a,b: {"])
def test_invalid_key_name_is_rejected(name: str) -> None:
    result = run_keys_new("--name", name)
    assert result.exit_code == 2
    assert "--name" in result.stderr
    assert result.stdout == ""


def test_numeric_key_name_stays_a_string() -> None:
    lines = run_keys_new("--name", "017").stdout.partition("\n")[2]
    [known] = load_text(CONFIG + lines, "gateway.yaml", env={}).keys
    assert known.name == "017"
