"""Messages between the supervisor and a process are encoded and decoded."""

import socket

from gateway.config.source import ConfigText
from gateway.multiprocess.ipc import IpcChannel, ListenerPort, PrepareReload


async def test_messages_are_received_completely_and_in_order() -> None:
    own_end, theirs = socket.socketpair()
    one, other = await IpcChannel.connect(own_end), await IpcChannel.connect(theirs)
    messages = [
        PrepareReload(ConfigText(b"x" * size, "x.yaml", {"A": "b"}), [ListenerPort("h:0", 1, 5000)])
        for size in (0, 1 << 20)
    ]
    for message in messages:
        one.send(message)

    assert [await other.receive(), await other.receive()] == messages

    one.close()
    assert await other.receive() is None

    other.close()


async def test_truncated_message_is_discarded() -> None:
    own_end, theirs = socket.socketpair()
    line = await IpcChannel.connect(theirs)

    with own_end:
        own_end.sendall(b"\0\0\0\5ab")

    assert await line.receive() is None

    line.close()
