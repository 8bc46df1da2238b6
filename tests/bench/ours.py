"""The gateway under test: a process of its own, with what anybody would have switched on."""

import hashlib
import platform
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests.bench.targets import (
    FROM_TRITON,
    KEY,
    OPENAI,
    TO_TRITON,
    Gateway,
    Seat,
    Start,
    always,
)

_CONFIG: Final = """
listeners:
  - {{address: "127.0.0.1:{port}", protocols: [openai, {{name: triton, profile: vllm}}]{front}}}
admin: {{address: "127.0.0.1:0"}}
limits: {{body: 8MiB, shutdown_delay: 0s, drain_timeout: 1s}}
backends:
  same: {{protocol: openai, workers: ["http://127.0.0.1:{worker}"]}}
  other:
    protocol: triton
    profile: vllm
    chat_template: "{template}"
    workers: ["http://127.0.0.1:{worker}"]
models:
  mock: {{backend: same}}
  triton-mock: {{backend: other, model: mock}}
keys:
  - {{name: bench, sha256: "{digest}", models: [mock, triton-mock]}}
"""
_TEMPLATE: Final = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def start(seat: Seat, front: str = "", processes: int = 1) -> Start:
    """``interlingua serve`` with keys, limits, retries, metrics and a log line for each request.

    ``front`` is what the listener says of it; nothing leaves the one that everybody gets.
    """
    template = seat.folder / "chat.jinja"
    template.write_text(_TEMPLATE, "utf-8")
    file = seat.folder / "gateway.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    told = _CONFIG.format(
        port=seat.port, worker=seat.worker, template=template, digest=digest, front=front
    )
    file.write_text(told, "utf-8")
    more = ["--processes", str(processes)] if processes > 1 else []
    return Start([sys.executable, "-m", "gateway", "serve", str(file), *more])


def echo(seat: Seat) -> Start:
    """What everything else in Python can be measured by."""
    return Start([sys.executable, str(Path(__file__).with_name("echo.py")), str(seat.port)])


_LIBRARIES: Final = ", ".join(
    f"{name} {version(name)}" for name in ("uvloop", "httptools", "aiohttp", "msgspec")
)
OURS: Final = Gateway(
    name="interlingua",
    start=start,
    version=always(f"{version('interlingua')} (Python {platform.python_version()}, {_LIBRARIES})"),
    ways=(OPENAI, TO_TRITON, FROM_TRITON),
)
REFERENCE: Final = Gateway(
    name="interlingua, reference front",
    start=partial(start, front=", http_server: aiohttp"),
    version=always(f"aiohttp {version('aiohttp')} in the place of our own listener"),
    ways=(OPENAI,),
)
TWO: Final = Gateway(
    name="interlingua, two processes",
    start=partial(start, processes=2),
    version=always("--processes 2; here they share a core"),
    ways=(OPENAI,),
)
ECHO: Final = Gateway(
    name="bare protocol",
    start=echo,
    version=always(f"uvloop {version('uvloop')}, no parser, no worker"),
    ways=(OPENAI,),
    forms=frozenset({"whole"}),
)
DIRECT: Final = Gateway(
    name="no gateway",
    start=None,
    version=always("the worker's own share"),
    ways=(OPENAI,),
)
