"""One of several processes: serves its part, and does what the supervisor says.

    python -m gateway.processes.serving DESCRIPTOR

The descriptor is its end of the line. When the other end is gone it stops, as it does for SIGTERM:
what runs comes to its end.
"""

import asyncio
import itertools
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from backends.aside import Aside
from gateway.app import App, surroundings
from gateway.config import Complaint, ConfigError, Loaded
from gateway.config.complaints import START
from gateway.core.errors import WorkerError
from gateway.descriptors import raise_limit
from gateway.processes.line import (
    Begin,
    Done,
    Failed,
    Line,
    Outcome,
    Prepare,
    Prepared,
    Ready,
    Seated,
    Verdict,
    Wish,
)
from gateway.processes.loops import loop_factory, settle
from gateway.processes.shares import share
from gateway.processes.stopping import Stopping
from gateway.processes.text import Text
from gateway.recording.lines import Lines, the_log
from gateway.reload import Origin, Told

log = logging.getLogger("interlingua")


class _Overruled(Exception):
    """Another process can't serve what this one could."""


class Among:
    """The other processes, as the supervisor tells of them: see ``gateway.app.Among``."""

    def __init__(self, line: Line, begin: Begin) -> None:
        self.channel = line
        self._process_count = begin.process_count
        self.admin_socket = begin.admin_socket
        self._commit = asyncio.get_running_loop().create_future()
        self._pending_reloads: dict[int, asyncio.Future[Told]] = {}
        self._request_numbers = itertools.count()

    def load_partition(self, text: Text, ports: Sequence[Seated]) -> Loaded:
        """What this process serves of a text. Raises ConfigError."""
        whole = text.load()
        taken = {(one.address, one.number): one.port for one in ports}
        return replace(whole, config=share(whole.config, self._process_count, taken))

    async def confirm_reload(self) -> None:
        self._commit = asyncio.get_running_loop().create_future()
        self.channel.send(Prepared())
        if not await self._commit:
            raise _Overruled

    async def reload(self) -> Told:
        number = next(self._request_numbers)
        self._pending_reloads[number] = asyncio.get_running_loop().create_future()
        self.channel.send(Wish(number))
        try:
            return await self._pending_reloads[number]
        finally:
            del self._pending_reloads[number]

    async def follow_supervisor(self, app: App, gone: asyncio.Event) -> None:
        """Do what the supervisor says until it is ``gone``."""
        async with asyncio.TaskGroup() as tasks:
            while (told := await self.channel.receive()) is not None:
                match told:
                    case Prepare(text, ports):
                        tasks.create_task(self._apply_config(app, text, ports))
                    case Verdict(go):
                        self._commit.set_result(go)
                    case Outcome(number, outcome) if number in self._pending_reloads:
                        self._pending_reloads[number].set_result(outcome)
                    case _:
                        """Who asked has left."""
            gone.set()

    async def _apply_config(self, app: App, text: Text, ports: Sequence[Seated]) -> None:
        try:
            await app.apply_config(
                await Aside(partial(self.load_partition, text, ports)).wait_result()
            )
        except _Overruled:
            self.channel.send(Done())
        except ConfigError as error:
            self.channel.send(Prepared(error.issues))
        except Exception:
            log.exception("a reload failed")
            bug = Complaint(START.line, START.column, "the gateway failed; its log has the cause")
            self.channel.send(Prepared([bug]))
        else:
            self.channel.send(Done())


async def serve(end: socket.socket) -> int:
    """Serve until told to stop; gives the process's exit code."""
    line = await Line.connect(end)
    begin = await line.receive()
    if not isinstance(begin, Begin):
        return 1
    logging.basicConfig(level=begin.log_level, format="%(levelname)s %(name)s: %(message)s")
    among = Among(line, begin)
    try:
        loaded = among.load_partition(begin.config_text, begin.ports)
    except ConfigError as error:
        line.send(Failed(str(error)))
        return 1
    told = loaded.config.observe.access_log
    with the_log(told.buffer, exchanges=told.format != "off") as lines:
        return await _serve(loaded, among, lines, draining=begin.draining)


async def _serve(loaded: Loaded, among: Among, lines: Lines, *, draining: bool) -> int:
    loop, stopping = asyncio.get_running_loop(), Stopping()
    origin = Origin(loaded, lambda: loaded)
    app = App(loaded.config, surroundings(lines), origin=origin, among=among)
    app.set_draining(on=draining)
    try:
        urls = await app.start()
    except (OSError, WorkerError) as error:
        among.channel.send(Failed(str(error)))
        await app.stop()
        return 1
    settle()
    among.channel.send(
        Ready([*filter(None, urls)], [info.name for info in app.router.list_models()])
    )
    following = loop.create_task(among.follow_supervisor(app, stopping.event))
    await stopping.wait()
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    await app.stop(lame_duck=stopping.use_shutdown_delay)
    return 0


def main() -> int:
    """Serve, with the descriptor that the command line names."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor's to hear
    raise_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
