"""Runs a page's blocks as a reader would: in order, in one shell, in a new folder.

    ```sh                      is run, and must succeed
    ```python                  is run by the tests' Python
    ```yaml title="NAME"       is written to the file NAME, in any language
    ```text                    is the output of the block before it
    ```console, ```py          is only shown; tests/docs/test_every_page.py has the reasons

In an output ``…`` matches anything on its line, a line with only that any lines, and spaces match
any run of spaces. ``interlingua`` is the tested one. A command that serves in the foreground is one
that a reader leaves running in another shell: it runs until the next such command, or the end.
Loopback ports are replaced by free ones, and so is ``${PORT:-8000}``. Processes that still run at
the end of the page are stopped.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tests.deploy.tools import LIBRARIES, find_tool
from tests.support.ports import reserve_port

_FENCE = re.compile(r"^```(\w*)(?: title=\"([\w./-]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PORT = re.compile(r"\$\{(\w*PORT):-(\d+)\}")
_SHOWN = re.compile(r"(?:(?<=127\.0\.0\.1:)|(?<=--port ))\d{4,5}\b")
_SERVES = re.compile(r"^(?=interlingua (?:serve|worker)\b[^&|\n]*$)", re.MULTILINE)
_BUILT_IN = {"PORT": "8000"}
"""Port variables of the built-in configurations."""
_SERVERS = ("redis-server", "prometheus")
"""Other programs that a page may start."""
_PATIENCE = 90.0
"""Timeout of a page in seconds."""

_FUNCTIONS = """
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
curl() {
  case " $* " in *' --retry-connrefused '*)
    local address="${!#}" tries=600
    address="${address#http://}" address="${address%%/*}"
    until (: <>"/dev/tcp/${address/://}") 2>>"$BESIDE/refused" || ((tries-- == 0)); do
      sleep 0.05
    done ;;
  esac
  command curl "$@"
}
"""
"""Shell functions: one leaves its command running once it serves; the other, a ``curl`` that would
try again each second until a server listens, first waits for that server."""


class Block(Struct):
    """Commands with their shown output, if any; or a file."""

    line: int
    commands: str
    printed: str | None = None
    kind: str = "sh"
    file: str = ""


class PageRun(Struct, frozen=True):
    """The exit code, the output of each block, and everything on standard error."""

    code: int
    outputs: Sequence[str]
    errors: str


def parse_blocks(page: str) -> list[Block]:
    """Return the blocks that a reader would follow."""
    blocks: list[Block] = []
    for fence in _FENCE.finditer(page):
        kind, file, body = fence.groups("")
        line = page.count("\n", 0, fence.start()) + 1
        if file:
            blocks.append(Block(line, body, kind="file", file=file))
        elif kind in ("sh", "python"):
            blocks.append(Block(line, body, kind=kind))
        elif kind == "text":
            assert blocks, "an output block has no commands before it"
            assert blocks[-1].printed is None, f"{blocks[-1].line}: it is shown twice"
            blocks[-1].printed = body
    return blocks


def allocate_ports(page: str) -> dict[str, str]:
    """Return a free port for each shown port and for each variable."""
    named = dict(_PORT.findall(page)) | _BUILT_IN
    shown = {*named.values(), *_SHOWN.findall(page)}
    free = {port: str(reserve_port()) for port in shown}
    return free | {name: free[port] for name, port in named.items()}


def run_page(page: str, folder: Path, stand_in: str = "", programs: Path | None = None) -> PageRun:
    """Run the page's blocks in ``folder``.

    ``stand_in`` is the configuration of a gateway that plays the reader's workers. ``programs`` is
    the folder of an installed ``interlingua``, in place of this environment's.
    """
    every = parse_blocks(page)
    printed = folder.with_name(f"{folder.name}-printed")
    printed.mkdir()
    ports = allocate_ports(page + stand_in)
    pieces = [_FUNCTIONS]
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
            env=_build_path_environment(servers, programs)
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
            with suppress(ProcessLookupError):  # no process is left
                os.killpg(shell.pid, signal.SIGKILL)
    files = [printed / str(n) for n in range(len(every))]
    outputs = [_restore_ports(file.read_text("utf-8"), ports) for file in files if file.exists()]
    return PageRun(code, outputs, (printed / "errors").read_text("utf-8"))


def _build_path_environment(servers: Sequence[str], programs: Path | None) -> dict[str, str]:
    """Return a PATH with ``interlingua`` and these programs."""
    folders = [programs or Path(sys.executable).parent, *(Path(one).parent for one in servers)]
    environment = os.environ | {"PATH": ":".join([*map(str, folders), os.environ["PATH"]])}
    return environment | {"LD_LIBRARY_PATH": str(LIBRARIES)} if servers else environment


def describe_difference(shown: str, printed: str) -> str:
    """Return how an output differs from the shown one, or ""."""
    is_equal = _match_lines(shown.strip("\n").splitlines(), printed.strip("\n").splitlines())
    return "" if is_equal else f"shown:\n{shown}\nprinted:\n{printed}"


def _match_lines(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Return whether the lines match those shown, in time proportional to the product of both."""
    lines = [_normalize_spaces(line) for line in printed]
    ends = {0}
    """How many lines the shown lines so far may match."""
    for number, text in enumerate(shown):
        pattern = re.compile(_build_line_pattern(text))
        if text.strip() == "…" and number < len(shown) - 1:
            ends = set(range(min(ends, default=len(lines) + 1), len(lines) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(lines) and pattern.fullmatch(lines[end])}
    return len(lines) in ends


def check_page(page: str, folder: Path, stand_in: str = "", programs: Path | None = None) -> None:
    """Run the page as ``run_page`` does. Raises AssertionError for the first wrong block."""
    every = parse_blocks(page)
    assert every, "the page has no block to run: is a fence not closed?"
    ran = run_page(page, folder, stand_in, programs)
    for block, printed in zip(every, ran.outputs, strict=False):
        if block.printed is not None and (why := describe_difference(block.printed, printed)):
            raise AssertionError(f"line {block.line}: {why}\n{ran.errors}")
    assert ran.outputs or ran.code == 0, ran.errors
    last = every[len(ran.outputs) - 1]
    assert ran.code == 0, f"line {last.line} failed:\n{last.commands}\n{ran.errors}"


def _build_script(block: Block, python: Path, ports: Mapping[str, str]) -> str:
    """Build the shell script."""
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
    """Build the pattern of one line."""
    return ".*".join(map(re.escape, _normalize_spaces(text).split("…")))


def _normalize_spaces(text: str) -> str:
    return " ".join(text.split())
