"""A gateway that is a process, with its configuration in a file.

async with GatewayProcess(tmp_path, CONFIGURATION) as gateway:
    gateway.put(ANOTHER)
    await gateway.serves(ANOTHER)
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
from tests.fault.protocol_clients import wait_until

_SERVES = re.compile(r'interlingua serves .* on (http[^\s"]+)(?: and (http[^\s"]+))*')
_RECORD_START = '{"id":'
_RECORD = msgspec.json.Decoder(RequestRecord)


class GatewayProcess:
    """``interlingua serve FILE``, asked to stop at the end. What it says goes into a file, too.

    ``text`` is the configuration, in the file ``gateway.yaml`` of ``folder``, or of ``file``.
    ``program`` is what runs it.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        *more: str,
        file: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m", "gateway"),
    ) -> None:
        self.file = file or folder / "gateway.yaml"
        if file is None:
            self.file.write_text(text)
        self._command = [*program, "serve", str(self.file), *more]
        self._log = folder / "gateway.log"
        self.urls: list[str] = []

    async def __aenter__(self) -> Self:
        self.process = self._spawn()
        await wait_until(
            lambda: _SERVES.search(self.read_output()) or self.process.poll() is not None, 30
        )
        match = _SERVES.search(self.read_output())
        assert match is not None, self.read_output()
        self.urls = re.findall(r'http[^\s"]+', match[0])
        self.http = httpx.AsyncClient(timeout=30)
        return self

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
        """Of the first listener."""
        return int(self.urls[0].rpartition(":")[2])

    async def stop(self, within: float = 30.0) -> int:
        """Ask it to stop; gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: self.process.poll() is not None, within)
        return self.process.returncode

    # --- its configuration ------------------------------------------------------------------------

    def put(self, text: str) -> None:
        """This is the file now, in the place of the old one: whole at once."""
        new_file = self.file.with_suffix(".new")
        new_file.write_text(text)
        new_file.replace(self.file)

    def hang_up(self) -> None:
        """Send it SIGHUP."""
        self.process.send_signal(signal.SIGHUP)

    async def post(self) -> httpx.Response:
        """Ask its admin listener for a reload; gives the answer."""
        return await self.http.post(f"{self.urls[-1]}/-/reload")

    async def counts(self) -> dict[str, float]:
        """Its metrics of reloads, by name and labels."""
        page = await self.http.get(f"{self.urls[-1]}/metrics")
        lines = re.findall(r"^interlingua_config_(\S+) (\S+)$", page.text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def serves(self, text: str, seconds: float = 10.0) -> None:
        """Wait until this is the configuration that it serves."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        async with asyncio.timeout(seconds):
            while f'info{{hash="{digest}"}}' not in await self.counts():  # noqa: ASYNC110 - none
                await asyncio.sleep(0.02)

    # --- what it says, and how it is --------------------------------------------------------------

    def read_output(self) -> str:
        """All that it said so far."""
        return self._log.read_text("utf-8")

    def records(self) -> list[RequestRecord]:
        """Those of its exchanges so far."""
        lines = self.read_output().splitlines(keepends=True)
        return [
            _RECORD.decode(one)
            for one in lines
            if one.startswith(_RECORD_START) and one.endswith("\n")
        ]

    def memory(self) -> int:
        """What it has in memory, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])


def build_config(**parts: Any) -> str:
    """A configuration with a client and an admin listener, as JSON, which YAML reads.

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
