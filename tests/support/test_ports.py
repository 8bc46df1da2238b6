"""A reserved port stays free for the server that it is meant for."""

import socket

import pytest

from tests.support.ports import reserve_port


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_server_listens_on_a_reserved_port(option: int) -> None:
    """Given either option of servers, when one binds the port, then clients reach it there."""
    port = reserve_port()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(("127.0.0.1", port))
        server.listen()

        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            accepted, address = server.accept()
            accepted.close()
            assert address == client.getsockname()


def test_reserved_port_without_a_server_refuses_connections() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reserve_port()), timeout=30)


def test_reserved_port_is_in_use_for_other_programs() -> None:
    """Given a reserved port, when someone binds it without those options, then it is in use."""
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
