"""The wish that a process stops, as signals tell it."""

import asyncio
import signal


class ShutdownSignal:
    """SIGTERM and SIGINT, and whatever else sets ``event``.

    SIGINT is somebody at a terminal: nobody sends requests here who would have to learn of it, so
    it asks for no ``lame_duck``.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.use_shutdown_delay = True
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.event.set)
        loop.add_signal_handler(signal.SIGINT, self._stop_now)

    async def wait(self) -> None:
        """Wait for it. From then on the next signal ends the process at once."""
        await self.event.wait()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)

    def _stop_now(self) -> None:
        self.use_shutdown_delay = False
        self.event.set()
