"""A gateway process with its configuration in a file.

async with GatewayProcess(tmp_path, CONFIGURATION) as gateway:
    gateway.write_config(OTHER)
    await gateway.wait_until_serving(OTHER)
"""

import asyncio
import hashlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from gateway.observability.record import RequestRecord
from tests.support.waiting import PATIENCE, wait_until

_SERVES = re.compile(r'interlingua serves .* on (http[^\s"]+)(?: and (http[^\s"]+))*')
_RECORD_LOGGER = '"logger":"access"'
_RECORD = msgspec.json.Decoder(RequestRecord)


class GatewayProcess:
    """``interlingua serve FILE``, stopped at the end; its log goes to a file.

    ``text`` is the configuration in ``gateway.yaml`` of ``folder``; ``file`` is an existing one to
    use instead. ``program`` is the command that runs the gateway.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        *arguments: str,
        file: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m", "gateway"),
    ) -> None:
        self.file = file or folder / "gateway.yaml"
        if file is None:
            self.file.write_text(text)
        self._command = [*program, "serve", str(self.file), *arguments]
        self._log = folder / "gateway.log"
        self.urls: list[str] = []

    async def __aenter__(self) -> Self:
        await self._start()
        self.http = httpx.AsyncClient(timeout=30)
        return self

    async def _start(self) -> None:
        self.process = self._spawn()
        await wait_until(
            lambda: _SERVES.search(self.read_output()) or self.process.poll() is not None, 30
        )
        match = _SERVES.search(self.read_output())
        assert match is not None, self.read_output()
        self.urls = re.findall(r'http[^\s"]+', match[0])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.http.aclose()
        try:
            assert await self.stop() == 0, self.read_output()
        finally:
            self.process.kill()
            self.process.wait()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return int(self.urls[0].rpartition(":")[2])

    async def stop(self, within: float = 30.0) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: self.process.poll() is not None, within)
        return self.process.returncode

    async def kill_and_restart(self) -> None:
        """Send SIGKILL, and start it again, with a new log and perhaps other ports."""
        self.process.kill()
        self.process.wait()
        await self._start()

    # --- configuration ----------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Replace the configuration file atomically."""
        new_file = self.file.with_suffix(".new")
        new_file.write_text(text)
        new_file.replace(self.file)

    def send_sighup(self) -> None:
        """Send SIGHUP, which reloads the configuration."""
        self.process.send_signal(signal.SIGHUP)

    async def request_reload(self) -> httpx.Response:
        """Reload through the admin listener and return its response."""
        return await self.http.post(f"{self.urls[-1]}/-/reload")

    async def read_reload_metrics(self) -> dict[str, float]:
        """Return the reload metrics by name and labels."""
        page = await self.http.get(f"{self.urls[-1]}/metrics")
        lines = re.findall(r"^interlingua_config_(\S+) (\S+)$", page.text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def wait_until_serving(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until the gateway serves this configuration."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        async with asyncio.timeout(seconds):
            while f'info{{hash="{digest}"}}' not in await self.read_reload_metrics():  # noqa: ASYNC110 - none
                await asyncio.sleep(0.02)

    # --- log and resources ------------------------------------------------------------------------

    def read_output(self) -> str:
        """Return the log so far."""
        return self._log.read_text("utf-8")

    def read_records(self) -> list[RequestRecord]:
        """Return the access log's request records so far."""
        lines = self.read_output().splitlines(keepends=True)
        return [
            _RECORD.decode(one) for one in lines if _RECORD_LOGGER in one and one.endswith("\n")
        ]

    def get_resident_memory(self) -> int:
        """Return the resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10

    def count_descriptors(self) -> int:
        """Return the number of open file descriptors."""
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])


def build_config(**parts: Any) -> str:
    """Build a configuration with a client listener and an admin listener, in JSON.

    A part that is None is left out.
    """
    config: dict[str, Any] = {
        "listeners": [{"address": "127.0.0.1:0", "protocols": ["openai"]}],
        "admin": {"address": "127.0.0.1:0"},
        "backends": {"echo": {"kind": "echo", "script": ["Hello", " world"]}},
        "models": {"m": {"backend": "echo"}},
    }
    limits = {"shutdown_delay": "0s"} | parts.get("limits", {})
    whole = config | parts | {"limits": limits}
    set_parts = {name: part for name, part in whole.items() if part is not None}
    return msgspec.json.format(msgspec.json.encode(set_parts), indent=2).decode()
