"""What is measured: a gateway is how to start it, and the pairs through it.

Each is told the port to listen on, the worker's port, and a folder for its files. One that is not
installed says so, and how to have it; ``python -m tests.bench install`` does what can be done.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.bench import traffic
from tests.bench.load_generator import Form, Load
from tests.bench.traffic import KEYS, Request

KEY: Final = KEYS[0]
_PROSE: Final = "Tell me, in plain words, what the brown fox did, and why the dog let it be. "


class LaunchContext(Struct, frozen=True):
    """Where a gateway is to listen, who answers it, and where it may keep files."""

    port: int
    worker_port: int
    folder: Path
    spare_port: int
    """Another port, for what it would serve beside."""


class LaunchCommand(Struct, frozen=True):
    """A command, what is added to its environment, and where it runs."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}
    folder: Path | None = None


class ProtocolPair(Struct, frozen=True):
    """The client's and the worker's protocol. ``{model}`` in its paths is ``model``.

    ``varied`` gives the requests of a varied load from its form and how many keys there are;
    ``body`` gives that of a repeated load.
    """

    name: str
    paths: Mapping[Form, str]
    body: Callable[[str, Load], Mapping[str, object]]
    varied: Callable[[Form, int], Sequence[Request]]
    model: str = "mock"
    end: str = ""

    def requests(self, load: Load, keys: int = len(KEYS)) -> Sequence[Request]:
        """What a load sends."""
        if not load.repeated:
            return self.varied(load.form, keys)
        body = self.body(self.model, load)
        return [traffic.repeated_request(self.path(load.form), body)]

    def path(self, form: Form) -> str:
        """Where such requests go."""
        return self.paths[form].format(model=self.model)


class Gateway(Struct, frozen=True, kw_only=True):
    """One that can be measured. ``version`` is None where it is not installed.

    ``headers`` are lines. ``forms``: what it is able to do. ``keys``: how many API keys it can
    have. ``start_timeout`` is how long its start may take, in seconds.
    """

    name: str
    start: Callable[[LaunchContext], LaunchCommand] | None
    """None is the worker itself."""
    version: Callable[[], str | None]
    get: str = ""
    """How to have it."""
    pairs: Sequence[ProtocolPair] = ()
    headers: Callable[[LaunchContext], Sequence[str]] = lambda context: ()
    forms: frozenset[Form] = frozenset({"whole", "stream"})
    keys: int = len(KEYS)
    start_timeout: float = 15.0


def _chat(model: str, load: Load) -> Mapping[str, object]:
    """A conversation of about the load's size."""
    told = _PROSE * max(1, (load.size - 210) // len(_PROSE))
    messages = [
        {"role": "system", "content": "You are a helpful assistant. Be brief, and be right."},
        {"role": "user", "content": told},
    ]
    more: Mapping[str, object] = {}
    if load.form == "stream":
        more = {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "model": model,
        "messages": messages,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 512,
        **more,
    }


def _generate(model: str, load: Load) -> Mapping[str, object]:
    """A prompt of about the load's size."""
    del model
    told = _PROSE * max(1, (load.size - 100) // len(_PROSE))
    return {
        "text_input": told,
        "stream": load.form == "stream",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 512,
    }


TRITON_PREFIX: Final = "triton-"
"""Of the public names of models whose workers speak Triton's protocol."""

OPENAI: Final = ProtocolPair(
    "OpenAI to OpenAI",
    {"whole": "/v1/chat/completions", "stream": "/v1/chat/completions"},
    _chat,
    lambda form, keys: traffic.chat_requests(form, keys=keys),
    end="data: [DONE]",
)
TO_TRITON: Final = ProtocolPair(
    "OpenAI to Triton",
    OPENAI.paths,
    _chat,
    lambda form, keys: traffic.chat_requests(form, TRITON_PREFIX, keys=keys, full=False),
    TRITON_PREFIX + OPENAI.model,
    OPENAI.end,
)
FROM_TRITON: Final = ProtocolPair(
    "Triton to OpenAI",
    {
        "whole": "/v2/models/{model}/generate",
        "stream": "/v2/models/{model}/generate_stream",
    },
    _generate,
    lambda form, keys: traffic.generate_requests(form, keys=keys),
)


def read_version(pattern: str, *command: str) -> str | None:
    """What a command says of its version; None where it is not here."""
    program = shutil.which(command[0])
    if program is None:
        return None
    told = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    found = re.search(pattern, told.stdout + told.stderr)
    return found[1] if found else "?"


def make_constant(version: str) -> Callable[[], str]:
    """For what is always here."""
    return lambda: version
