"""A file that can't be opened leaks no file descriptor."""

from pathlib import Path

import pytest

from gateway.store.response_store import StoreLimits, StoreUnavailable
from gateway.store.sqlite_store import SqliteResponseStore


def count_open_files(path: Path) -> int:
    descriptors = list(Path("/proc/self/fd").iterdir())  # the listing's own descriptor is closed
    return sum(one.is_symlink() and one.readlink() == path for one in descriptors)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
async def test_file_that_is_no_database_is_closed_after_each_attempt(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    file.write_bytes(b"This is no database. " * 100)
    limits = StoreLimits(retention=60, owner_count=10, owner_bytes=1000, total_bytes=10_000)
    store = SqliteResponseStore(str(file), limits, lambda: 0.0)

    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await store.find_response("owner", "resp_1")

    assert count_open_files(file) == 0

    await store.aclose()
