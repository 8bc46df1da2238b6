"""The measured gateways: how each starts, and the protocols of its clients and workers.

A gateway that is not installed is reported with the way to install it.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.bench import loads, traffic
from tests.bench.loads import KEYS, MANY, Form, Kind, Load, Traffic
from tests.bench.traffic import Request

KEY: Final = KEYS[0]
REPEATED_MODEL: Final = "mock"
"""The model of repeated requests."""


class LaunchContext(Struct, frozen=True):
    """The ports of a gateway, and a folder for its files.

    ``spare_port`` is for further listeners, and ``tls_port`` for TLS with ``certificate``, a file
    that also has the private key.
    """

    port: int
    worker_port: int
    folder: Path
    spare_port: int
    tls_port: int = 0
    certificate: Path = Path()


class LaunchCommand(Struct, frozen=True):
    """A command, its additional environment variables, and its working directory."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}
    folder: Path | None = None


class ProtocolPair(Struct, frozen=True):
    """The protocols of clients and workers. ``end`` is the end mark of streams."""

    name: str
    kinds: frozenset[Kind]
    make_requests: Callable[[Traffic, Form], Sequence[Request]]
    end: str = ""

    def supports(self, load: Load) -> bool:
        """Whether there are requests for the load."""
        return load.traffic.kind in self.kinds and (load.pairs is None or self.name in load.pairs)


class Gateway(Struct, frozen=True, kw_only=True):
    """A gateway that can be measured. ``version`` returns None if it is not installed.

    ``headers`` are lines added to each request, and ``removed_headers`` names those to leave out.
    ``keys`` is the number of API keys that it supports. ``start_timeout`` is in seconds.
    """

    name: str
    start: Callable[[LaunchContext], LaunchCommand] | None
    """None stands for the worker itself."""
    version: Callable[[], str | None]
    install_hint: str = ""
    pairs: Sequence[ProtocolPair] = ()
    headers: Callable[[LaunchContext], Sequence[str]] = lambda context: ()
    removed_headers: frozenset[str] = frozenset()
    loads: frozenset[str] | None = None
    """Names of its loads; None: all."""
    forms: frozenset[Form] = frozenset({"unary", "stream"})
    keys: int = MANY
    tls: bool = False
    start_timeout: float = 15.0

    def supports(self, load: Load) -> bool:
        """Whether it gets this load."""
        return (
            load.form in self.forms
            and (self.tls or not load.tls)
            and (self.loads is None or load.name in self.loads)
            and (load.gateways is None or self.name in load.gateways)
        )


TRITON_PREFIX: Final = "triton-"
"""The prefix of public model names whose workers have Triton's protocol."""


def _make_openai_requests(wanted: Traffic, form: Form) -> Sequence[Request]:
    if wanted.kind == "repeated":
        return traffic.repeated_chat(wanted, form, REPEATED_MODEL)
    if wanted.kind == "embeddings":
        return traffic.embedding_requests(wanted)
    return traffic.chat_requests(wanted, form)


def _make_requests_for_triton(wanted: Traffic, form: Form) -> Sequence[Request]:
    if wanted.kind == "repeated":
        return traffic.repeated_chat(wanted, form, TRITON_PREFIX + REPEATED_MODEL)
    return traffic.chat_requests(wanted, form, TRITON_PREFIX, full=False)


def _make_triton_requests(wanted: Traffic, form: Form) -> Sequence[Request]:
    if wanted.kind == "repeated":
        return traffic.repeated_generate(wanted, form, REPEATED_MODEL)
    return traffic.generate_requests(wanted, form)


_CHAT_END: Final = "data: [DONE]"
OPENAI: Final = ProtocolPair(
    loads.OPENAI_PAIR,
    frozenset({"mixed", "repeated", "images", "embeddings"}),
    _make_openai_requests,
    _CHAT_END,
)
TO_TRITON: Final = ProtocolPair(
    loads.TO_TRITON_PAIR, frozenset({"mixed", "repeated"}), _make_requests_for_triton, _CHAT_END
)
FROM_TRITON: Final = ProtocolPair(
    loads.FROM_TRITON_PAIR, frozenset({"mixed", "repeated"}), _make_triton_requests
)
FROM_MINDIE: Final = ProtocolPair(
    loads.FROM_MINDIE_PAIR,
    frozenset({"mixed"}),
    traffic.mindie_requests,
)


def read_version(pattern: str, *command: str) -> str | None:
    """Return the version that a command prints, or None if it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return None
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    match = re.search(pattern, done.stdout + done.stderr)
    return match[1] if match else "?"


def make_constant(version: str) -> Callable[[], str]:
    """Return a version function for what is always installed."""
    return lambda: version
