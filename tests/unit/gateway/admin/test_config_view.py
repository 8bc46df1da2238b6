"""The displayed configuration has its secrets masked, and shows differences from its file."""

from pathlib import Path

import pytest

from gateway.admin.config_view import compare_lines, describe_config, list_secret_fields, mask_yaml
from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes

TEXT = """\
# bearer: sk-in-a-comment
state: {redis: "redis://:sk-in-a-url@localhost/0"}
shared: &shared sk-anchored
backends:
  pool:
    workers:
      - url: "http://user:sk-of-the-url@a.example/v1"  # auth: {bearer: sk-at-the-end}
        auth: {bearer: "sk-in-\\u0071uotes"}
      - {url: "http://b.example", auth: {basic: {username: u, password: sk-basic}}}
      - url: "http://c.example"
        auth:
          bearer: >-
            sk-folded
            sk-second-line
      - {url: "http://d.example", auth: {bearer: *shared}}
      - {url: "http://e.example", auth: {bearer: "${TOKEN}"}}
      - {url: "http://f.example", auth: {bearer: "${TOKEN:-sk-default}"}}
    note: sk-given-elsewhere
observe: {traces: {otlp: "http://t.example", headers: {x-key: sk-header}}}
keys: [{name: ann, sha256: sk-digest}]
"""


def test_every_secret_in_a_text_is_masked_whatever_else_is_wrong_with_it() -> None:
    masked = mask_yaml(TEXT.encode(), ("sk-given-elsewhere",))

    assert "sk-" not in masked
    assert len(masked.splitlines()) == len(TEXT.splitlines()), "line numbers are unchanged"
    for shown in ("${TOKEN}", "a.example/v1", "name: ann", "otlp: ", "note: "):
        assert shown in masked
    assert mask_yaml(b"models: {chat: {backend: a}} # fine\n") == (
        "models: {chat: {backend: a}} # fine\n"
    )


def test_fields_of_all_secrets_of_the_schema_are_masked() -> None:
    secret_fields = {
        "bearer",
        "headers",
        "password",
        "postgres",
        "redis",
        "value",
        "sha256",
        "watermark",
    }
    assert list_secret_fields() >= secret_fields


@pytest.mark.parametrize("data", [b"a: [", b"\xff", b"#" * (2 << 20), b"a: &a [*a]"])
def test_text_that_cannot_be_read_or_is_too_large_is_not_shown(data: bytes) -> None:
    with pytest.raises(ConfigError):
        mask_yaml(data)


def test_changed_lines_are_listed_as_they_were_and_as_they_are() -> None:
    lines = compare_lines(["a", "b", "c"], ["a", "B", "c", "d"])
    assert [(one.active, one.file, one.text) for one in lines] == [
        (1, 1, "a"),
        (2, None, "b"),
        (None, 2, "B"),
        (3, 3, "c"),
        (None, 4, "d"),
    ]


def test_long_texts_are_not_compared_line_by_line() -> None:
    text = ["same"] * 6000
    assert len(compare_lines(text, text)) == 6000
    assert len(compare_lines(text, [*text, "new"])) == 12_001


async def test_description_has_the_lines_in_effect_and_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: {a: {kind: echo}}\nmodels: {chat: {backend: a}}\n")
    loaded = load_bytes(file.read_bytes(), str(file), env={})

    async def list_lines() -> list[tuple[int | None, int | None, str]] | None:
        description = await describe_config(loaded.config, loaded.hash, str(file), loaded.data)
        lines = description["lines"]
        return None if lines is None else [(one.active, one.file, one.text) for one in lines]

    same = [(1, 1, "backends: {a: {kind: echo}}"), (2, 2, "models: {chat: {backend: a}}")]
    assert await list_lines() == same

    file.write_text("backends: {a: {kind: echo}}\nmodels: {talk: {backend: a}}\n")
    assert await list_lines() == [
        same[0],
        (2, None, same[1][2]),
        (None, 2, "models: {talk: {backend: a}}"),
    ]

    file.write_text("models: [")
    assert await list_lines() is None
