"""The supervisor reserves ports for its processes."""

import socket

import pytest

from gateway.multiprocess.supervisor import PortReservations


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_reserved_port_can_be_shared_with_reuse_port(address: str) -> None:
    held = PortReservations()
    held.reserve((address, 0))
    held.reserve((address, 1))
    one, other = (held.ports[address, number] for number in (0, 1))

    assert one != other

    host = address.rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(2):  # one after another: the reserving socket accepts no connection
        with socket.socket(family) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, one))
            shared.listen()
            with socket.create_connection((host, one)), shared.accept()[0]:
                pass
    held.release_others(frozenset())


def test_released_port_is_free() -> None:
    held = PortReservations()
    held.reserve(("127.0.0.1:0", 0))
    held.reserve(("127.0.0.1:0", 1))
    port = held.ports["127.0.0.1:0", 0]

    held.release_others(frozenset({("127.0.0.1:0", 1)}))

    assert [*held.ports] == [("127.0.0.1:0", 1)]

    with socket.create_server(("127.0.0.1", port)):
        held.release_others(frozenset())


def test_port_in_use_by_another_gateway_is_rejected() -> None:
    held = PortReservations()
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as theirs:
        port = theirs.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            held.reserve((f"127.0.0.1:{port}", 0))
    assert not held.ports
