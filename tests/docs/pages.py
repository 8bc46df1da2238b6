"""Runs the blocks of a page as a reader would: in their order, in one shell, in a new folder.

    ```sh                      is run; anything that fails fails the page
    ```python                  is run, by the Python of the tests
    ```yaml title="NAME"       is written into the file NAME, whatever its language
    ```text                    is what the block before it prints
    ```console, ```py          is only shown; tests/docs/test_every_page.py says why

In what is printed ``…`` stands for anything on its line, a line of nothing else for any lines, and
a run of spaces for any other. ``interlingua`` is the one under test. A command that serves and is
not put into the background is one that a reader leaves running in a shell of its own: it runs until
the next such command, or the end. Of ports on loopback free ones stand in the place of those that
are shown, and ``${PORT:-8000}``, where a page names one, is that of 8000. What still runs when the
page ends is stopped.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tests.deploy.tools import LIBRARIES, find_tool

_FENCE = re.compile(r"^```(\w*)(?: title=\"([\w./-]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"\$\{(\w*PORT):-(\d+)\}")
_SHOWN = re.compile(r"(?:(?<=127\.0\.0\.1:)|(?<=--port ))\d{4,5}\b")
_SERVES = re.compile(r"^(?=interlingua (?:serve|worker)\b[^&|\n]*$)", re.MULTILINE)
_BUILT_IN = {"PORT": "8000"}
"""What the built-in configurations call their port."""
_SERVERS = ("redis-server", "prometheus")
"""What a page may start besides ours."""
_PATIENCE = 90.0
"""Seconds that a page may take."""

_LEFT = """
left() {
  if [ -n "${left-}" ]; then
    while kill "$left" 2>>"$BESIDE/left"; do sleep 0.1; done # again and again: at once
  fi
  : >"$BESIDE/left"
  "$@" 2>>"$BESIDE/left" >&2 & left=$!
  until grep -q 'interlingua serves' "$BESIDE/left"; do
    kill -0 "$left" 2>>"$BESIDE/left" || { cat "$BESIDE/left" >&2; return 1; }
    sleep 0.05
  done
}
"""
"""The shell's function that leaves its command running, once it has said that it serves."""


class Block(Struct):
    """Commands, and what they are said to print, if the page says it. Or a file."""

    line: int
    commands: str
    printed: str | None = None
    kind: str = "sh"
    file: str = ""


class PageRun(Struct, frozen=True):
    """How it went: the exit code, what each block printed, and all that was said on the side."""

    code: int
    outputs: Sequence[str]
    errors: str


def parse_blocks(page: str) -> list[Block]:
    """The blocks of a page that a reader would follow."""
    blocks: list[Block] = []
    for fence in _FENCE.finditer(page):
        kind, file, body = fence.groups("")
        line = page.count("\n", 0, fence.start()) + 1
        if file:
            blocks.append(Block(line, body, kind="file", file=file))
        elif kind in ("sh", "python"):
            blocks.append(Block(line, body, kind=kind))
        elif kind == "text":
            assert blocks, "a page shows what is printed before anything is run"
            assert blocks[-1].printed is None, f"{blocks[-1].line}: it is shown twice"
            blocks[-1].printed = body
    return blocks


def allocate_ports(page: str) -> dict[str, str]:
    """A free port for each that the page shows, by what is shown; and for each variable."""
    named = dict(_PORT.findall(page)) | _BUILT_IN
    shown = {*named.values(), *_SHOWN.findall(page)}
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in shown]
    free = {
        port: str(listener.getsockname()[1])
        for port, listener in zip(sorted(shown), listeners, strict=True)
    }
    for listener in listeners:
        listener.close()
    return free | {name: free[port] for name, port in named.items()}


def run_page(page: str, folder: Path, stand_in: str = "") -> PageRun:
    """Run the page's blocks in ``folder``.

    ``stand_in`` is the configuration of what serves beside, in the place of the reader's workers.
    """
    every = parse_blocks(page)
    printed = folder.with_name(f"{folder.name}-printed")
    printed.mkdir()
    ports = allocate_ports(page + stand_in)
    pieces = [_LEFT]
    if stand_in:
        (printed / "stand-in.yaml").write_text(_replace_ports(stand_in, ports), "utf-8")
        pieces.append(f"left interlingua serve {printed}/stand-in.yaml; left=")
    for n, block in enumerate(every):
        pieces.append(
            f"exec >{printed / str(n)}\n{_build_script(block, printed / f'{n}.py', ports)}"
        )
    servers = [find_tool(name) for name in _SERVERS if re.search(rf"^{name} ", page, re.MULTILINE)]
    with (printed / "errors").open("w+b") as errors:
        shell = subprocess.Popen(
            ["/bin/bash", "-euo", "pipefail", "-c", "\n".join(pieces)],
            cwd=folder,
            env=_build_path_environment(servers)
            | _get_port_variables(ports)
            | {"BESIDE": str(printed)},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = shell.wait(_PATIENCE)
        finally:
            with suppress(ProcessLookupError):  # nothing runs any more
                os.killpg(shell.pid, signal.SIGKILL)
    files = [printed / str(n) for n in range(len(every))]
    outputs = [_restore_ports(file.read_text("utf-8"), ports) for file in files if file.exists()]
    return PageRun(code, outputs, (printed / "errors").read_text("utf-8"))


def _build_path_environment(servers: Sequence[str]) -> dict[str, str]:
    """Where a shell finds ``interlingua``, and these."""
    folders = [Path(one).parent for one in (sys.executable, *servers)]
    environment = os.environ | {"PATH": ":".join([*map(str, folders), os.environ["PATH"]])}
    return environment | {"LD_LIBRARY_PATH": str(LIBRARIES)} if servers else environment


def describe_difference(shown: str, printed: str) -> str:
    """How what was printed is not what is shown; "" where it is."""
    is_equal = _match_lines(shown.strip("\n").splitlines(), printed.strip("\n").splitlines())
    return "" if is_equal else f"shown:\n{shown}\nprinted:\n{printed}"


def _match_lines(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines are those shown. Takes at most the product of both numbers of steps."""
    lines = [_normalize_spaces(line) for line in printed]
    ends = {0}
    """How many of the lines those shown so far may be."""
    for number, text in enumerate(shown):
        pattern = re.compile(_build_line_pattern(text))
        if text.strip() == "…" and number < len(shown) - 1:
            ends = set(range(min(ends, default=len(lines) + 1), len(lines) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(lines) and pattern.fullmatch(lines[end])}
    return len(lines) in ends


def check_page(page: str, folder: Path, stand_in: str = "") -> None:
    """Run the page. Raises AssertionError with the first block that does not do as it says."""
    every = parse_blocks(page)
    assert every, "it has nothing to run: is a fence not closed?"
    ran = run_page(page, folder, stand_in)
    for block, printed in zip(every, ran.outputs, strict=False):
        if block.printed is not None and (why := describe_difference(block.printed, printed)):
            raise AssertionError(f"line {block.line}: {why}\n{ran.errors}")
    assert ran.outputs or ran.code == 0, ran.errors
    last = every[len(ran.outputs) - 1]
    assert ran.code == 0, f"line {last.line} failed:\n{last.commands}\n{ran.errors}"


def _build_script(block: Block, python: Path, ports: Mapping[str, str]) -> str:
    """What the shell is told to do."""
    match block.kind:
        case "file":
            body = _replace_ports(block.commands, ports)
            return f"cat >{block.file} <<'END OF FILE'\n{body}END OF FILE\n"
        case "python":
            python.write_text(_replace_ports(block.commands, ports), "utf-8")
            return f"PYTHONPATH=. python {python}\n"
        case _:
            return _replace_ports(_SERVES.sub("left ", block.commands), ports)


def _get_port_variables(ports: Mapping[str, str]) -> dict[str, str]:
    return {name: port for name, port in ports.items() if not name.isdigit()}


def _replace_ports(text: str, ports: Mapping[str, str]) -> str:
    return _SHOWN.sub(lambda shown: ports[shown[0]], text)


def _restore_ports(text: str, ports: Mapping[str, str]) -> str:
    shown = {free: port for port, free in ports.items() if port.isdigit()}
    return _SHOWN.sub(lambda free: shown.get(free[0], free[0]), text)


def _build_line_pattern(text: str) -> str:
    """A pattern for one line."""
    return ".*".join(map(re.escape, _normalize_spaces(text).split("…")))


def _normalize_spaces(text: str) -> str:
    return " ".join(text.split())
