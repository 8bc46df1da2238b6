"""The life of a gateway in one process: from its start until it is told to stop."""

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from gateway.config.loader import LoadConfig, LoadedConfig
from gateway.observability.access_log import AccessLogWriter
from gateway.processes.loops import tune_gc
from gateway.processes.stopping import ShutdownSignal
from protocols.core.errors import WorkerError

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.handover import SocketHandover


class ServerProcess(Struct, frozen=True):
    """What it begins with: see ``gateway.commands.serve.run_gateway``."""

    initial_config: LoadedConfig
    load_config: LoadConfig
    watched_file: str | None
    access_log: AccessLogWriter
    wait_for_warmup: bool
    handover_path: str | None

    async def run(self) -> int:
        """Serve until told to stop; gives the command's exit code. A second signal ends at once."""
        from gateway.app import Gateway, build_services
        from gateway.handover import SocketHandover  # noqa: PLC0415 - as above
        from gateway.processes.following import ReloadTrigger  # noqa: PLC0415 - as above
        from gateway.reload import ConfigSource  # noqa: PLC0415 - as above

        origin = ConfigSource(self.initial_config, self.load_config)
        app = Gateway(self.initial_config.config, build_services(self.access_log), origin=origin)
        assert app.reloader is not None  # noqa: S101 - it was made with its origin
        stopping, following = ShutdownSignal(), ReloadTrigger(app.reloader, self.watched_file)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, following.reload_requested.set)
        heir = (
            SocketHandover(self.handover_path, lambda: app.socket_fds)
            if self.handover_path
            else None
        )
        try:
            urls = await self._start_gateway(app, heir, stopping)
        except (OSError, WorkerError) as error:
            what = "listen" if isinstance(error, OSError) else "serve"
            click.echo(f"interlingua can't {what}: {error}", err=True)
            await app.stop()
            return 1
        if not urls:
            await app.stop()
            return 0
        models = ", ".join(info.name for info in app.router.list_models()) or "any"
        click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(following.run())]
            if heir is not None:
                running.append(tasks.create_task(_stop_after_handover(app, heir, stopping.event)))
            await stopping.wait()
            for task in running:
                task.cancel()
        self.access_log.write_text(
            "interlingua stops when what runs has ended; signal again to stop at once"
        )
        await app.stop(lame_duck=stopping.use_shutdown_delay)
        if heir is not None:
            heir.close()
        return 0

    async def _start_gateway(
        self, app: "Gateway", heir: "SocketHandover | None", stopping: ShutdownSignal
    ) -> Sequence[str]:
        """Take the place of the gateway that runs, if one does; gives the URLs.

        None where it was told to stop first. Raises OSError and WorkerError.
        """
        from gateway.handover import InheritedSockets  # noqa: PLC0415 - as above

        loop = asyncio.get_running_loop()
        with InheritedSockets(self.handover_path) as inherited:
            starting = loop.create_task(app.start(inherited, warmed=self.wait_for_warmup))
            if not await _wait_for_start(starting, stopping.event):
                return ()
            urls = starting.result()
            tune_gc()
            if heir is not None:
                heir.listen()
            inherited.confirm_serving()
        return urls


async def _stop_after_handover(
    app: "Gateway", heir: "SocketHandover", stopping: asyncio.Event
) -> None:
    """Leave the listeners to another once it serves, and stop."""
    await heir.wait_for_successor()
    app.stop_accepting()
    stopping.set()


async def _wait_for_start(starting: "asyncio.Task[list[str]]", stopping: asyncio.Event) -> bool:
    """Wait for the start, or for the wish to stop, whichever comes first; whether it started."""
    async with asyncio.TaskGroup() as tasks:
        wish = tasks.create_task(stopping.wait())
        await asyncio.wait({starting, wish}, return_when=asyncio.FIRST_COMPLETED)
        wish.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return False
    return True
