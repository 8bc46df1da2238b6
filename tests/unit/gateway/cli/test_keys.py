"""``interlingua keys`` creates keys that the gateway accepts."""

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

    [key_config] = load_text(CONFIG + lines, "gateway.yaml", env={}).keys

    assert key_config.name == "web-app"

    keyring = Authenticator([Principal(key_config.name, key_config.sha256)])
    principal = keyring.authenticate({"authorization": f"Bearer {key}"})
    assert principal is not None
    assert principal.name == "web-app"


def test_json_output_contains_name_key_and_digest() -> None:
    result = run_keys_new("--name", "web-app", "--json")
    body = json.loads(result.stdout)

    assert result.stderr == ""
    assert set(body) == {"name", "key", "sha256"}
    assert body["name"] == "web-app"
    assert body["sha256"] == hashlib.sha256(body["key"].encode()).hexdigest()


def test_keys_are_random_and_have_the_product_prefix() -> None:
    keys = {json.loads(run_keys_new("--json").stdout)["key"] for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"il-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_default_key_name_is_derived_from_the_digest() -> None:
    body = json.loads(run_keys_new("--json").stdout)
    assert body["name"] == f"key-{body['sha256'][:8]}"


@pytest.mark.parametrize("name", ["", "a b", "a" * 101, "a,b: {"])
def test_invalid_key_name_is_rejected(name: str) -> None:
    result = run_keys_new("--name", name)
    assert result.exit_code == 2
    assert "--name" in result.stderr
    assert result.stdout == ""


def test_numeric_key_name_stays_a_string() -> None:
    lines = run_keys_new("--name", "017").stdout.partition("\n")[2]
    [key_config] = load_text(CONFIG + lines, "gateway.yaml", env={}).keys
    assert key_config.name == "017"
