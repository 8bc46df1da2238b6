"""Discovery by a file, which is changed in every usual way."""

import threading
from pathlib import Path

import msgspec
import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError
from backends.pool.file_discovery import FileSource


def parse_workers(data: bytes) -> list[WorkerConfig]:
    return [WorkerConfig(url) for url in msgspec.json.decode(data, type=list[str])]


def encode_workers(*lasts: int) -> bytes:
    return msgspec.json.encode([f"http://10.0.0.{last}:80" for last in lasts])


async def list_last_digits(source: FileSource) -> str:
    return "".join(worker.url[-4] for worker in await source.list_workers())


async def test_worker_file_is_read_at_the_first_poll(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(encode_workers(1, 2))
    source = FileSource(path, parse_workers)

    assert source.interval == 1.0
    assert await list_last_digits(source) == "12"
    assert repr(source) == f"<FileSource {path}, 2 workers>"
    assert await list_last_digits(source) == "12"


async def test_overwritten_file_is_read_when_stable(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(encode_workers(1, 2))
    source = FileSource(path, parse_workers)
    await source.list_workers()

    path.write_bytes(encode_workers(1))
    assert await list_last_digits(source) == "12"

    path.write_bytes(encode_workers(1, 2, 3))
    assert await list_last_digits(source) == "12"
    assert await list_last_digits(source) == "123"


async def test_replaced_file_is_read_immediately(tmp_path: Path) -> None:
    path, new = tmp_path / "workers.json", tmp_path / "new"
    path.write_bytes(encode_workers(1))
    source = FileSource(path, parse_workers)
    await source.list_workers()

    new.write_bytes(encode_workers(2))
    new.replace(path)

    assert await list_last_digits(source) == "2"


async def test_changed_symlink_is_read_immediately(tmp_path: Path) -> None:
    """Kubernetes: workers.json -> ..data/workers.json, where ..data is a link that changes."""
    for name, last in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.json").write_bytes(encode_workers(last))
    (tmp_path / "..data").symlink_to("first")
    path = tmp_path / "workers.json"
    path.symlink_to("..data/workers.json")
    source = FileSource(path, parse_workers)

    assert await list_last_digits(source) == "1"

    (tmp_path / "..data_tmp").symlink_to("second")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    assert await list_last_digits(source) == "2"


async def test_invalid_worker_file_fails_until_corrected(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    reads: list[bytes] = []

    def count_reads(data: bytes) -> list[WorkerConfig]:
        reads.append(data)
        return parse_workers(data)

    path.write_bytes(encode_workers(1))
    source = FileSource(path, count_reads)
    await source.list_workers()
    path.write_bytes(encode_workers(1, 2)[:-1])
    await source.list_workers()

    for _ in range(3):
        with pytest.raises(DiscoveryError, match=r"workers\.json: "):
            await source.list_workers()
    assert len(reads) == 2

    path.write_bytes(encode_workers(1, 2))
    with pytest.raises(DiscoveryError):
        await source.list_workers()
    assert await list_last_digits(source) == "12"


async def test_invalid_worker_url_in_the_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b'["http://u:p@10.0.0.1:80"]')

    with pytest.raises(DiscoveryError, match="not a worker URL"):
        await FileSource(path, parse_workers).list_workers()


async def test_parser_error_without_message_is_reported_by_its_class(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b"[]")

    def broken(data: bytes) -> list[WorkerConfig]:
        raise KeyError

    with pytest.raises(DiscoveryError, match="KeyError"):
        await FileSource(path, broken).list_workers()


async def test_missing_worker_file_fails_until_restored(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    source = FileSource(path, parse_workers)
    with pytest.raises(DiscoveryError, match="no such file"):
        await source.list_workers()

    path.write_bytes(encode_workers(1))
    assert await list_last_digits(source) == "1"

    path.unlink()
    with pytest.raises(DiscoveryError, match="no such file"):
        await source.list_workers()

    path.write_bytes(encode_workers(1))
    assert await list_last_digits(source) == "1"


async def test_unreadable_worker_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(encode_workers(1))

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DiscoveryError, match="Permission denied"):
        await FileSource(path, parse_workers).list_workers()


async def test_oversized_worker_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b" " * ((1 << 20) + 1))

    with pytest.raises(DiscoveryError, match="larger than"):
        await FileSource(path, parse_workers).list_workers()


async def test_worker_file_read_timeout_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go = tmp_path / "workers.json", threading.Event()
    path.write_bytes(encode_workers(1))

    def slow(data: bytes) -> list[WorkerConfig]:
        go.wait(5)
        return parse_workers(data)

    monkeypatch.setattr("backends.pool.file_discovery._READ_TIMEOUT", 0.01)
    with pytest.raises(DiscoveryError, match="not read within"):
        await FileSource(path, slow).list_workers()

    go.set()
