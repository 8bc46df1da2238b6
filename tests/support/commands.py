"""Runs ``interlingua`` commands that end by themselves as processes."""

import asyncio
import signal
import sys


async def run_command(*arguments: object, stop_after: bytes | None = None) -> tuple[int, str]:
    """Return the command's exit code and output; send SIGINT once it has printed ``stop_after``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    printed = b""
    if stop_after is not None:
        while stop_after not in printed:
            line = await process.stdout.readline()
            assert line, printed
            printed += line
        process.send_signal(signal.SIGINT)
    printed += await process.stdout.read()
    return await process.wait(), printed.decode()
