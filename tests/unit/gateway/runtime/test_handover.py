"""Listening sockets are handed over to the next gateway."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from gateway.runtime.handover import InheritedSockets, SocketHandover

HERE, THERE = ("127.0.0.1:0", 0), ("127.0.0.1:0", 1)


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "handover"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def start_handover(socket_path: Path, *listeners: socket.socket) -> SocketHandover:
    """Start a handover of these sockets, the first at ``HERE`` and the others at ``THERE``."""
    descriptors = [one.fileno() for one in listeners]
    handover = SocketHandover(
        str(socket_path), lambda: {HERE: descriptors[:1], THERE: descriptors[1:]}
    )
    handover.listen()
    return handover


async def test_successor_inherits_sockets_and_unused_ones_are_closed(
    socket_path: Path, listener: socket.socket
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        old = start_handover(socket_path, listener, other)
        handed_over = asyncio.create_task(old.wait_for_successor())

        with await asyncio.to_thread(InheritedSockets, str(socket_path)) as successor:
            [mine] = successor.take_sockets(HERE)
            assert successor.take_sockets(HERE) == successor.take_sockets(("127.0.0.1:1", 0)) == ()
            assert mine.getsockname() == listener.getsockname()

            [left] = successor._sockets[THERE]
            successor.confirm_serving()
            await handed_over

        assert left.fileno() == -1

        mine.close()
        old.close()
    assert not socket_path.exists()


@pytest.mark.parametrize("name", ["handover", "handover.new"])
def test_file_at_the_path_is_never_replaced(
    socket_path: Path, listener: socket.socket, name: str
) -> None:
    file = socket_path.with_name(name)
    file.write_text("version: 1\n")

    with pytest.raises(FileExistsError, match="a file that is not a socket has this name"):
        start_handover(socket_path, listener)

    assert file.read_text() == "version: 1\n"


async def test_successor_that_exits_before_serving_is_ignored(
    socket_path: Path, listener: socket.socket
) -> None:
    old = start_handover(socket_path, listener)
    handed_over = asyncio.create_task(old.wait_for_successor())
    for _ in range(2):
        with await asyncio.to_thread(InheritedSockets, str(socket_path)):
            pass
    with await asyncio.to_thread(InheritedSockets, str(socket_path)) as successor:
        assert not handed_over.done()
        successor.confirm_serving()
        await handed_over
    old.close()


async def test_handover_path_is_taken_over_by_the_successor(
    socket_path: Path, listener: socket.socket
) -> None:
    """Only the owner may open the path."""
    old = start_handover(socket_path, listener)
    assert socket_path.stat().st_mode & 0o777 == 0o600

    new = start_handover(socket_path, listener)
    old.close()
    assert socket_path.exists()

    socket_path.unlink()
    new.close()


@pytest.mark.parametrize("left", [False, True])
def test_nothing_is_inherited_if_no_gateway_is_running(socket_path: Path, *, left: bool) -> None:
    """A killed gateway has left its socket there."""
    if left:
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(socket_path))
    with InheritedSockets(str(socket_path)) as successor:
        assert successor.take_sockets(HERE) == ()
        successor.confirm_serving()


def start_fake_gateway(socket_path: Path, *pieces: bytes) -> Thread:
    """A gateway that sends this and a socket to the next one, and then exits."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(socket_path))
    server.listen()

    def answer() -> None:
        with server:
            line, _ = server.accept()
            with line:
                for n, piece in enumerate(pieces):
                    socket.send_fds(line, [piece], [] if n else [server.fileno()])
                line.shutdown(socket.SHUT_WR)
                line.recv(1)

    thread = Thread(target=answer)
    thread.start()
    return thread


def test_fragmented_handover_message_is_reassembled(socket_path: Path) -> None:
    old = start_fake_gateway(socket_path, b'[["127.0.0', b'.1:0",0,1]]\n')
    with InheritedSockets(str(socket_path)) as successor:
        [taken] = successor.take_sockets(HERE)
        taken.close()
        successor.confirm_serving()
        old.join()
        successor.confirm_serving()  # the predecessor has exited, which is no error
        successor.confirm_serving()


@pytest.mark.parametrize("pieces", [(), (b"[[",)])
def test_incomplete_handover_message_raises_an_error(
    socket_path: Path, pieces: tuple[bytes, ...]
) -> None:
    old = start_fake_gateway(socket_path, *pieces)
    with pytest.raises(ConnectionAbortedError, match="gives nothing"):
        InheritedSockets(str(socket_path))
    old.join()


def test_missing_folder_of_the_handover_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "handover"
    handover = SocketHandover(str(path), dict)

    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{path}'"):
        handover.listen()
    handover.close()
