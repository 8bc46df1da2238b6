"""Workers in a network namespace with a faulty link, or with little memory; needs root.

with NetworkLink() as link:                # a namespace and a link to it
    async with link.worker(words=50) as worker:
        link.delay_packet = link.lose_all  # every packet is lost
"""

import asyncio
import fcntl
import heapq
import itertools
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import pytest

from tests.fault.processes import WorkerProcess

_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x1001
_TCP: Final = 6
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_FLAGS_AT: Final = 13
_MEMORY: Final = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()

PacketDelay = Callable[[bytes, bool], float | None]
"""Returns a packet's delay in seconds, or None if it is lost. True: it goes to the worker."""


def skip_unavailable(why: str) -> NoReturn:
    """Skip the test, or fail it where the complete suite must run."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class NetworkLink:
    """A network namespace; this process carries every packet between it and the host.

    The link is a pair of TUN devices. ``rate`` is in bytes per second, towards the host. The same
    ``seed`` draws the same losses and delays.
    """

    def __init__(self, seed: int = 7) -> None:
        place = os.getpid() % 0x4000 * 4
        mark = f"{place + next(_numbers) % 4:04x}"
        self._namespace = f"interlingua-{mark}"
        self._near, self._far = f"il{mark}n", f"il{mark}f"
        network = ip_address("198.18.0.0") + place
        self._here, self.there = str(network + 1), str(network + 2)
        self._ends: list[int] = []
        self._random = Random(seed)
        self._clear = [0.0, 0.0]
        """When the last packet arrives, in each direction: no packet overtakes another."""
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self.get_delay: PacketDelay = self.carry
        self.rate: float | None = None
        self.lost = 0
        """The number of lost packets."""

    def __enter__(self) -> Self:
        try:
            self._lay()
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            skip_unavailable(f"a network namespace can't be made here: {error}")
        loop = asyncio.get_running_loop()
        for number, end in enumerate(self._ends):
            loop.add_reader(end, self._pass, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            asyncio.get_running_loop().remove_reader(end)
        self._remove()

    def worker(self, port: int = 8000, **options: Any) -> WorkerProcess:
        """A worker at the other end."""
        inside = ["ip", "netns", "exec", self._namespace]
        return WorkerProcess(address=f"{self.there}:{port}", inside=inside, **options)

    # --- faults -----------------------------------------------------------------------------------

    def carry(self, packet: bytes, there: bool) -> float | None:
        """Deliver the packet without delay."""
        return 0.0

    def lose_all(self, packet: bytes, there: bool) -> float | None:
        """Lose every packet."""
        return None

    def lose_calls(self, packet: bytes, there: bool) -> float | None:
        """Lose every SYN, so that no connection is established."""
        return None if _get_tcp_flags(packet) & _SYN else 0.0

    def lose_some(self, part: float) -> PacketDelay:
        """Lose this share of all packets."""
        return lambda packet, there: None if self._random.random() < part else 0.0

    def delay(self, least: float, most: float) -> PacketDelay:
        """Delay each packet by ``least`` to ``most`` seconds."""
        return lambda packet, there: self._random.uniform(least, most)

    def reset(self, packet: bytes, there: bool) -> float | None:
        """Answer packets to the worker with RST, like a firewall that rejects them."""
        if there and packet[9] == _TCP and not _get_tcp_flags(packet) & _RST:
            os.write(self._ends[0], _build_rst_packet(packet))
        return None

    # --- carrying packets -------------------------------------------------------------------------

    def _pass(self, end: int) -> None:
        try:
            packet = os.read(self._ends[end], 1 << 16)
        except BlockingIOError:
            return
        if packet[0] >> 4 != 4:  # ignore IPv6
            return
        delay = self.get_delay(packet, end == 0)
        if delay is None:
            self.lost += 1
            return
        now = asyncio.get_running_loop().time()
        due = max(now + delay, self._clear[end])
        if self.rate is not None and end == 1:
            due += len(packet) / self.rate
        self._clear[end] = due
        if due <= now:
            os.write(self._ends[1 - end], packet)
            return
        heapq.heappush(self._late, (due, next(self._order), 1 - end, packet))
        asyncio.get_running_loop().call_at(due, self._arrive)

    def _arrive(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._late and self._late[0][0] <= now + 0.001:
            _, _, end, packet = heapq.heappop(self._late)
            if self._ends:
                os.write(self._ends[end], packet)

    def _lay(self) -> None:
        _run_ip("netns", "add", self._namespace)
        self._ends = [_open_tun(self._near), _open_tun(self._far)]
        _run_ip("link", "set", self._far, "netns", self._namespace)
        inside = ("-n", self._namespace)
        for where, device, address in ((), self._near, self._here), (inside, self._far, self.there):
            _run_ip(*where, "address", "add", f"{address}/30", "dev", device)
            _run_ip(*where, "link", "set", device, "up")

    def _remove(self) -> None:
        for end in self._ends:
            os.close(end)
        self._ends = []
        with suppress(OSError, subprocess.CalledProcessError):
            _run_ip("netns", "delete", self._namespace)


def _run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607 - where it may be


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return device


# ── packets ─────────────────────────────────────────────────────────────────────────────────────


def _get_tcp_flags(packet: bytes) -> int:
    """Return the TCP flags, 0 for another protocol."""
    return packet[4 * (packet[0] & 15) + _FLAGS_AT] if packet[9] == _TCP else 0


def _build_rst_packet(packet: bytes) -> bytes:
    """Build the RST that answers a TCP packet (RFC 9293, 3.10.7.1)."""
    start = 4 * (packet[0] & 15)
    near, far, number, awaited, offset, flags = struct.unpack_from("!HHIIBB", packet, start)
    size = len(packet) - start - 4 * (offset >> 4) + bool(flags & _SYN)
    if flags & _ACK:
        tcp = struct.pack("!HHIIBBHHH", far, near, awaited, 0, 0x50, _RST, 0, 0, 0)
    else:
        acknowledged = (number + size) & 0xFFFFFFFF
        tcp = struct.pack("!HHIIBBHHH", far, near, 0, acknowledged, 0x50, _RST | _ACK, 0, 0, 0)
    ends = packet[16:20] + packet[12:16]
    check = _compute_checksum(ends + struct.pack("!BBH", 0, _TCP, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", check) + tcp[18:]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0) + ends
    return head[:10] + struct.pack("!H", _compute_checksum(head)) + head[12:] + tcp


def _compute_checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def limit_memory(size: int) -> Iterator[Callable[[int], object]]:
    """Return a function that limits a process to ``size`` bytes; beyond, the kernel kills it."""
    group = _MEMORY / f"interlingua-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size))
        (group / "memory.swappiness").write_text("0")
    except OSError as error:
        skip_unavailable(f"memory can't be limited here: {error}")
    try:
        yield lambda process: (group / "cgroup.procs").write_text(str(process))
    finally:
        group.rmdir()
