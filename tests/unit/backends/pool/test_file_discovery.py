"""A file that lists workers, changed in every way that files are changed."""

import threading
from pathlib import Path

import msgspec
import pytest

from backends.http.interfaces import WorkerConfig
from backends.pool.discovery import DiscoveryError, FileSource


def read(data: bytes) -> list[WorkerConfig]:
    return [WorkerConfig(url) for url in msgspec.json.decode(data, type=list[str])]


def listing(*lasts: int) -> bytes:
    return msgspec.json.encode([f"http://10.0.0.{last}:80" for last in lasts])


async def lasts(source: FileSource) -> str:
    return "".join(worker.url[-4] for worker in await source.list_workers())


async def test_a_file_is_read_at_the_first_look(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(listing(1, 2))
    source = FileSource(path, read)

    assert source.interval == 1.0
    assert await lasts(source) == "12"
    assert await lasts(source) == "12"


async def test_what_is_written_over_counts_once_it_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(listing(1, 2))
    source = FileSource(path, read)
    await source.list_workers()

    path.write_bytes(listing(1))
    assert await lasts(source) == "12"
    path.write_bytes(listing(1, 2, 3))
    assert await lasts(source) == "12"
    assert await lasts(source) == "123"


async def test_what_is_put_in_its_place_counts_at_once(tmp_path: Path) -> None:
    path, new = tmp_path / "workers.json", tmp_path / "new"
    path.write_bytes(listing(1))
    source = FileSource(path, read)
    await source.list_workers()

    new.write_bytes(listing(2))
    new.replace(path)

    assert await lasts(source) == "2"


async def test_a_link_that_leads_elsewhere_counts_at_once(tmp_path: Path) -> None:
    """Kubernetes: workers.json -> ..data/workers.json, and ..data -> a folder, swapped whole."""
    for name, last in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.json").write_bytes(listing(last))
    (tmp_path / "..data").symlink_to("first")
    path = tmp_path / "workers.json"
    path.symlink_to("..data/workers.json")
    source = FileSource(path, read)
    assert await lasts(source) == "1"

    (tmp_path / "..data_tmp").symlink_to("second")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    assert await lasts(source) == "2"


async def test_a_file_that_is_wrong_is_a_failure_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    reads: list[bytes] = []

    def counted(data: bytes) -> list[WorkerConfig]:
        reads.append(data)
        return read(data)

    path.write_bytes(listing(1))
    source = FileSource(path, counted)
    await source.list_workers()
    path.write_bytes(listing(1, 2)[:-1])
    await source.list_workers()

    for _ in range(3):
        with pytest.raises(DiscoveryError, match=r"workers\.json: "):
            await source.list_workers()
    assert len(reads) == 2

    path.write_bytes(listing(1, 2))
    with pytest.raises(DiscoveryError):
        await source.list_workers()
    assert await lasts(source) == "12"


async def test_a_file_that_lists_what_is_no_worker_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b'["http://u:p@10.0.0.1:80"]')

    with pytest.raises(DiscoveryError, match="not a worker URL"):
        await FileSource(path, read).list_workers()


async def test_a_fault_without_words_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b"[]")

    def broken(data: bytes) -> list[WorkerConfig]:
        raise KeyError

    with pytest.raises(DiscoveryError, match="KeyError"):
        await FileSource(path, broken).list_workers()


async def test_a_file_that_is_gone_is_a_failure_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    source = FileSource(path, read)
    with pytest.raises(DiscoveryError, match="no such file"):
        await source.list_workers()

    path.write_bytes(listing(1))
    assert await lasts(source) == "1"
    path.unlink()
    with pytest.raises(DiscoveryError, match="no such file"):
        await source.list_workers()
    path.write_bytes(listing(1))
    assert await lasts(source) == "1"


async def test_a_file_that_may_not_be_read_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(listing(1))

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DiscoveryError, match="Permission denied"):
        await FileSource(path, read).list_workers()


async def test_a_file_that_is_too_large_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(b" " * ((1 << 20) + 1))

    with pytest.raises(DiscoveryError, match="larger than"):
        await FileSource(path, read).list_workers()


async def test_a_file_that_hangs_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go = tmp_path / "workers.json", threading.Event()
    path.write_bytes(listing(1))

    def slow(data: bytes) -> list[WorkerConfig]:
        go.wait(5)
        return read(data)

    monkeypatch.setattr("backends.pool.discovery._READ_TIMEOUT", 0.01)
    with pytest.raises(DiscoveryError, match="not read within"):
        await FileSource(path, slow).list_workers()
    go.set()
