"""A loaded configuration has the hash, the referenced files, and the position of each field."""

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
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "token.txt").write_text("secret")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "workers.yaml").write_text("[https://w]")
    path = tmp_path / "gateway.yaml"
    path.write_text(TEXT)
    return path


def test_configuration_hash_is_computed_from_the_file_bytes(config_file: Path) -> None:
    digest = hashlib.sha256(config_file.read_bytes()).hexdigest()
    assert load_file(str(config_file), env={}).hash == digest[:12]

    config_file.write_bytes(b"\xef\xbb\xbf" + config_file.read_bytes())
    assert load_file(str(config_file), env={}).hash != digest[:12]


def test_loaded_files_list_referenced_files_except_worker_files(config_file: Path) -> None:
    files = load_file(str(config_file), env={}).files
    folder = config_file.parent
    assert files == {str(PEM), str(folder / "token.txt"), f"{folder}/./chat.jinja"}


def test_config_error_lists_the_referenced_files(config_file: Path) -> None:
    """Missing files are listed, too."""
    (config_file.parent / "token.txt").unlink()
    with pytest.raises(ConfigError) as excinfo:
        load_file(str(config_file), env={})
    assert str(config_file.parent / "token.txt") in excinfo.value.files
    assert str(PEM) in excinfo.value.files


def test_unreadable_configuration_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_file(f"{tmp_path}/none.yaml", env={})
    assert str(excinfo.value).endswith(
        "none.yaml:1:1: the file can't be read: No such file or directory"
    )
    with pytest.raises(ConfigError, match="the file can't be read: Is a directory"):
        load_file(str(tmp_path), env={})


def test_later_errors_have_the_position_of_the_value_or_its_parent(config_file: Path) -> None:
    loaded = load_bytes(config_file.read_bytes(), str(config_file), env={})
    error = loaded.build_error(
        (("listeners", 0, "address"), "no"),
        (("backends", "far", "queue", "max"), "no"),
        (("admin",), "no"),
    )

    lines = [line.removeprefix(str(config_file)) for line in str(error).splitlines()]

    assert lines == [
        ":1:1: no (at admin)",
        ":2:14: no (at listeners[0].address)",
        ":7:5: no (at backends.far.queue.max)",
    ]
    assert error.files == loaded.files
