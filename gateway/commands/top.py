"""``interlingua top``: what a running gateway does, on a board in the terminal."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    import httpx

    from gateway.board import Board, Frame

_PATIENCE: Final = 10.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The terminal's other screen, without a cursor."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME, _END, _BELOW = "\x1b[H", "\x1b[K\n", "\x1b[J"


@click.command()
@click.argument("url")
@click.option(
    "--key",
    envvar="INTERLINGUA_ADMIN_KEY",
    help="The admin listener's key; better said in INTERLINGUA_ADMIN_KEY.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1, 60),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look twice, print what came between, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each frame as a line of JSON.")
def top(url: str, key: str | None, every: float, *, once: bool, as_json: bool) -> None:
    """Show what the gateway does whose admin listener is at URL, until Ctrl-C.

    Requests, errors and tokens by the second and the time to the first token, for each version of
    each model, over the last minute; and each worker with its health. Where no first token came in
    that minute, its time is that of all since the start.

    Exit codes: 0 good, 2 wrong usage, or the gateway can't be asked at the start.
    """
    import httpx  # noqa: PLC0415 - no other verb needs it at once

    from gateway.board import Board  # noqa: PLC0415 - as above

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = url.rstrip("/")
    with httpx.Client(headers=headers, timeout=_PATIENCE) as client:
        board = Board(url)
        first = _frame(client, url, board)
        frames = _frames(client, url, board, every, first)
        try:
            if once:
                _told(next(frames), as_json=as_json)
            elif as_json or not sys.stdout.isatty():
                for frame in frames:
                    _told(frame, as_json=as_json)
            else:
                with _screen():
                    for frame in chain([first], frames):
                        _drawn(frame)
        except KeyboardInterrupt:
            return


def _frames(
    client: "httpx.Client", url: str, board: "Board", every: float, last: "Frame"
) -> Iterator["Frame"]:
    """One after the other. What can't be read for now is said on the last one that was."""
    while True:
        time.sleep(every)
        try:
            last = _frame(client, url, board)
        except click.UsageError as error:
            last = replace(last, trouble=error.message)
        yield last


def _frame(client: "httpx.Client", url: str, board: "Board") -> "Frame":
    """What the gateway tells now. Raises UsageError."""
    from gateway.board import Unreadable, read  # noqa: PLC0415 - as above

    try:
        counts = read(_asked(client, f"{url}/metrics").decode("utf-8", "replace"))
        workers: Mapping[str, Any] = msgspec.json.decode(_asked(client, f"{url}/-/workers"))
        return board.look(time.monotonic(), counts, workers["backends"])
    except (Unreadable, msgspec.DecodeError, LookupError, TypeError, AttributeError):
        raise click.UsageError(f"{url} is no gateway's admin listener") from None


def _asked(client: "httpx.Client", page: str) -> bytes:
    """Raises UsageError."""
    import httpx  # noqa: PLC0415 - as above

    try:
        answer = client.get(page)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.UsageError(f"{page} can't be asked: {error}") from None
    if not answer.is_success:
        raise click.UsageError(f"{page} answers {answer.status_code}")
    return answer.content


# --- showing it -----------------------------------------------------------------------------------


@contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, as long as it is needed."""
    _written(_ENTER)
    try:
        yield
    finally:
        _written(_LEAVE)


def _drawn(frame: "Frame") -> None:
    """In the place of the last one."""
    width, height = shutil.get_terminal_size()
    lines = [_cut(line, width) for line in frame.lines(colours=_colours())]
    _written(_HOME + "".join(f"{line}{_END}" for line in lines[: height - 1]) + _BELOW)


def _told(frame: "Frame", *, as_json: bool) -> None:
    """Below the last one."""
    if as_json:
        click.echo(msgspec.json.encode(frame))
    else:
        click.echo("\n".join((*frame.lines(colours=_colours()), "")), color=_colours())


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _written(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _cut(line: str, width: int) -> str:
    """As much of it as has room; colours take none."""
    room, kept, at = width, [], 0
    while at < len(line) and room:
        if line[at] == "\x1b":
            end = line.index("m", at) + 1
        else:
            end, room = at + 1, room - 1
        kept.append(line[at:end])
        at = end
    return "".join(kept) + ("\x1b[0m" if "\x1b" in line else "")
