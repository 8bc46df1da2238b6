"""The life of a gateway in one process: from its start until it is told to stop."""

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from gateway.config import Loaded, Source
from gateway.core.errors import WorkerError
from gateway.processes.loops import settle
from gateway.processes.stopping import Stopping
from gateway.recording.lines import Lines

if TYPE_CHECKING:
    from gateway.app import App
    from gateway.handover import Handover


class Life(Struct, frozen=True):
    """What it begins with: see ``gateway.commands.serve.served``."""

    first: Loaded
    source: Source
    watched: str | None
    lines: Lines
    warmed: bool
    handover: str | None

    async def run(self) -> int:
        """Serve until told to stop; gives the command's exit code. A second signal ends at once."""
        from gateway.app import App, surroundings  # noqa: PLC0415 - a bad file is told without it
        from gateway.handover import Handover  # noqa: PLC0415 - as above
        from gateway.processes.following import Following  # noqa: PLC0415 - as above
        from gateway.reload import Origin  # noqa: PLC0415 - as above

        origin = Origin(self.first, self.source)
        app = App(self.first.config, surroundings(self.lines), origin=origin)
        assert app.reloader is not None  # noqa: S101 - it was made with its origin
        stopping, following = Stopping(), Following(app.reloader, self.watched)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, following.changed.set)
        heir = Handover(self.handover, lambda: app.listening) if self.handover else None
        try:
            urls = await self._start(app, heir, stopping)
        except (OSError, WorkerError) as error:
            what = "listen" if isinstance(error, OSError) else "serve"
            click.echo(f"interlingua can't {what}: {error}", err=True)
            await app.stop()
            return 1
        if not urls:
            await app.stop()
            return 0
        models = ", ".join(info.name for info in app.router.models()) or "any"
        click.echo(f"interlingua serves {models} on {' and '.join(urls)}", err=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(following.run())]
            if heir is not None:
                running.append(tasks.create_task(_left(app, heir, stopping.event)))
            await stopping.come()
            for task in running:
                task.cancel()
        self.lines.say("interlingua stops when what runs has ended; signal again to stop at once")
        await app.stop(lame_duck=stopping.lame_duck)
        if heir is not None:
            heir.close()
        return 0

    async def _start(
        self, app: "App", heir: "Handover | None", stopping: Stopping
    ) -> Sequence[str]:
        """Take the place of the gateway that runs, if one does; gives the URLs.

        None where it was told to stop first. Raises OSError and WorkerError.
        """
        from gateway.handover import Inherited  # noqa: PLC0415 - as above

        loop = asyncio.get_running_loop()
        with Inherited(self.handover) as inherited:
            starting = loop.create_task(app.start(inherited, warmed=self.warmed))
            if not await _first(starting, stopping.event):
                return ()
            urls = starting.result()
            settle()
            if heir is not None:
                heir.listen()
            inherited.serves()
        return urls


async def _left(app: "App", heir: "Handover", stopping: asyncio.Event) -> None:
    """Leave the listeners to another once it serves, and stop."""
    await heir.given()
    app.shut()
    stopping.set()


async def _first(starting: "asyncio.Task[list[str]]", stopping: asyncio.Event) -> bool:
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
