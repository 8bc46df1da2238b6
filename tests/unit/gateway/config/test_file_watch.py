"""Changes of watched files are detected, once they are stable."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.config.file_watch import FileState, FileWatcher, read_file_state
from tests.support.waiting import PATIENCE

A, B, C = (FileState((1, 1), digest) for digest in (b"a", b"b", b"c"))
OTHER = FileState((1, 2), b"b")


def find_changes(*looks: Mapping[str, FileState | None]) -> list[int]:
    """Return the numbers of the polls that report a change; the first poll reports none."""
    changes: list[int] = []
    done: list[Mapping[str, FileState | None]] = []
    watch = FileWatcher(list, lambda: changes.append(len(done) - 1))
    for one in (looks[0], *looks):
        watch.update(one)
        done.append(one)
    return changes


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([A, A, A], []),
        ([A, OTHER, OTHER], [1]),
        ([A, B, B, B], [2]),
        ([A, B, C, C], [3]),
        ([A, B, A, A], []),
        ([A, None, None, None], [2]),
        ([A, None, A, A], []),
        ([A, None, OTHER, OTHER, OTHER], [3]),
        ([None, None, A, A, A], [3]),
    ],
    ids=[
        "it stays",
        "another is put in its place",
        "it is written in place",
        "it is written for long",
        "it is as before",
        "it goes",
        "it goes and comes back",
        "it goes and another comes",
        "it comes",
    ],
)
def test_change_is_reported_when_the_file_is_stable(
    looks: list[FileState | None], expected: list[int]
) -> None:
    assert find_changes(*({"file": one} for one in looks)) == expected


def test_newly_watched_file_is_no_change() -> None:
    assert find_changes({"one": A}, {"one": A, "two": B}, {"one": A, "two": B}) == []


def test_file_that_is_no_longer_watched_is_no_change() -> None:
    assert find_changes({"one": A, "two": B}, {"one": A}, {"one": A}) == []


def test_change_is_delayed_while_another_file_is_being_written() -> None:
    looks = [{"one": A, "two": A}, {"one": OTHER, "two": B}, {"one": OTHER, "two": B}]
    assert find_changes(*looks) == [2]


def test_file_state_covers_file_content_folder_listing_and_link_target(tmp_path: Path) -> None:
    """A file's state is its content, a folder's its listing, a link's its target."""
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.write_text("one")
    folder.mkdir()
    link.symlink_to(file)

    assert read_file_state(str(tmp_path / "none")) is None
    assert read_file_state(str(link)) == read_file_state(str(file))

    before, empty = read_file_state(str(file)), read_file_state(str(folder))
    assert before is not None
    assert empty is not None

    file.write_text("two")
    after = read_file_state(str(file))
    assert after is not None
    assert (after.device_inode, after.digest != before.digest) == (before.device_inode, True)

    (folder / "inside").write_text("x")
    assert read_file_state(str(folder)) != empty


def test_device_file_is_not_read() -> None:
    device = read_file_state("/dev/zero")
    again = read_file_state("/dev/null")

    assert device is not None
    assert again is not None
    assert device.digest == again.digest


async def test_file_watcher_polls_until_cancelled(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    changed = asyncio.Event()
    watch = FileWatcher(lambda: [str(file)], changed.set, interval=0.01)
    task = asyncio.get_running_loop().create_task(watch.run())
    await asyncio.sleep(0.05)

    assert not changed.is_set()

    (tmp_path / "new").write_text("two")
    (tmp_path / "new").replace(file)
    async with asyncio.timeout(PATIENCE):
        await changed.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
