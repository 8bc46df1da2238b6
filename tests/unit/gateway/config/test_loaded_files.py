"""A configuration with its file: the hash, the files that it names, and where things are."""

import hashlib
from pathlib import Path

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_bytes, load_file

PEM = Path(__file__).parents[3] / "fault" / "loopback.pem"
TEXT = f"""\
listeners:
  - address: "127.0.0.1:8000"
    protocols: [openai]
    tls: {{cert: {PEM}, key: {PEM}}}
backends:
  far:
    protocol: triton
    chat_template: ./chat.jinja
    workers:
      - {{url: "https://w", auth: {{bearer: {{file: token.txt}}}}}}
      - {{file: workers.yaml}}
models: {{m: {{backend: far}}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "token.txt").write_text("secret")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "workers.yaml").write_text("[https://w]")
    made = tmp_path / "gateway.yaml"
    made.write_text(TEXT)
    return made


def test_the_hash_is_that_of_the_files_bytes(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert load_file(str(file), env={}).hash == digest[:12]
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_file(str(file), env={}).hash != digest[:12]


def test_the_files_that_it_names_are_told_but_for_those_that_pools_watch(file: Path) -> None:
    found = load_file(str(file), env={}).files
    folder = file.parent
    assert found == {str(PEM), str(folder / "token.txt"), f"{folder}/./chat.jinja"}


def test_a_bad_one_tells_them_too(file: Path) -> None:
    """Those that are missing, as well."""
    (file.parent / "token.txt").unlink()
    with pytest.raises(ConfigError) as caught:
        load_file(str(file), env={})
    assert str(file.parent / "token.txt") in caught.value.files
    assert str(PEM) in caught.value.files


def test_what_cannot_be_read_is_a_complaint_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_file(f"{tmp_path}/none.yaml", env={})
    assert str(caught.value).endswith(
        "none.yaml:1:1: the file can't be read: No such file or directory"
    )
    with pytest.raises(ConfigError, match="the file can't be read: Is a directory"):
        load_file(str(tmp_path), env={})


def test_a_refusal_has_the_place_of_what_it_is_for_or_of_what_that_is_in(file: Path) -> None:
    found = load_bytes(file.read_bytes(), str(file), env={})
    error = found.build_error(
        (("listeners", 0, "address"), "no"),
        (("backends", "far", "queue", "max"), "no"),
        (("admin",), "no"),
    )
    lines = [line.removeprefix(str(file)) for line in str(error).splitlines()]
    assert lines == [
        ":1:1: no (at admin)",
        ":2:14: no (at listeners[0].address)",
        ":7:5: no (at backends.far.queue.max)",
    ]
    assert error.files == found.files
