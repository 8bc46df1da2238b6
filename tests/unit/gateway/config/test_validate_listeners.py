"""The checks of listeners' settings."""

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text

CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai], allowed_hosts: ["{host}"]}}]
backends: {{e: {{kind: echo}}}}
models: {{m: {{backend: e}}}}
"""


@pytest.mark.parametrize(
    "host",
    ["http://a.example", "*.example", "a.example:80", "a.example.", "a b", " a", "a/", "::1"],
)
def test_allowed_host_that_no_header_can_match_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"2:7[0-9]: .*no Host can match this: write a name"):
        load_text(CONFIG.format(host=host), "g.yaml", env={})


@pytest.mark.parametrize("host", ["a.example", "A_b-c", "*", "10.0.0.1", "[fd00::1]"])
def test_name_alone_or_an_address_is_an_allowed_host(host: str) -> None:
    config = load_text(CONFIG.format(host=host), "g.yaml", env={})
    assert config.listeners[0].allowed_hosts == (host,)
