"""The number of function calls for a request and for a token.

Time can't be asserted on a shared machine; calls can. Every call of a Python or C function on the
event loop's thread is counted, in the listener, the pipeline, the adapters and the pool, under
uvloop, which adds none of its own. Keys, limits, metrics and the access log are on.

A change that adds work must raise a number below, and one that saves work must lower it: the test
fails in both directions and prints the counts.

``python -m tests.integration.test_call_counts`` also counts module changes: how often a call is in
another module of the project than the call before. A path that is easy to follow has few.
"""

import asyncio
import hashlib
import itertools
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import pytest
import uvloop
from msgspec import Struct

from gateway.config.loader import load_text
from gateway.config.schema import ServerLimitsConfig
from gateway.http_server.listener import Listener
from gateway.runtime.gateway import build_services
from gateway.runtime.snapshot import ConfigSnapshot
from gateway.runtime.telemetry import set_up_metrics
from tests.support.fakes import CHUNKED, END, chunk, make_reply


class Calls(Struct, frozen=True):
    """Calls for a unary response, for a stream without its tokens, and for each token."""

    unary: int
    stream: int
    token: int


PACKAGES: Final = ("gateway.", "backends.", "protocols.")
STATED: Final = {
    # Client's protocol, worker's protocol. "varied" is the OpenAI protocol with requests that
    # differ,
    # have tools and an ingress's headers, and get streamed tool calls.
    ("openai", "openai"): Calls(314, 691, 43),
    ("openai", "triton"): Calls(522, 687, 41),
    ("triton", "openai"): Calls(514, 730, 47),
    ("varied", "openai"): Calls(337, 790, 43),
}
ALLOWED_EXCESS: Final = 4
"""The tolerated excess: a read or a write may be split in two."""
ALLOWED_SHORTFALL: Final = 0.05
"""The tolerated shortfall, as a share: releases of Python differ in what they call."""
REPEATS: Final = 5
"""The lowest of this many counts is taken: a timer may fire during one of them."""

KEY: Final = "sk-counted"
CONFIG: Final = """
listeners:
  - {{address: "127.0.0.1:0", protocols: [openai, {{name: triton, profile: vllm}}]}}
admin: {{address: "127.0.0.1:0"}}
backends:
  pool:
    protocol: {protocol}
    {more}
    workers: ["{url}"]
    health: {{interval: 1h}}
models:
  mock: {{backend: pool}}
keys:
  - {{name: counted, sha256: "{digest}", models: [mock]}}
"""

# --- requests and responses -----------------------------------------------------------------------


def build_chat_request(stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "What did the brown fox do?"}]
    body = {"model": "mock", "messages": messages, "temperature": 0.7, "max_tokens": 99}
    return "/v1/chat/completions", body | ({"stream": True} if stream else {})


def build_generate_request(stream: bool) -> tuple[str, dict[str, Any]]:
    path = f"/v2/models/mock/generate{'_stream' if stream else ''}"
    return path, {"text_input": "What did it do?", "stream": stream, "max_tokens": 99}


def build_varied_request(stream: bool) -> tuple[str, dict[str, Any]]:
    """Build a conversation with tools and a unique prompt."""
    number = next(_numbers)
    schema = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
    function = {"name": "look", "description": "Look.", "parameters": schema}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What did fox {number:03} do?"},
    ]
    body = {"model": "mock", "messages": messages, "seed": number, "tool_choice": "auto"}
    body["tools"] = [{"type": "function", "function": function}]
    return "/v1/chat/completions", body | ({"stream": True} if stream else {})


def build_varied_headers() -> list[str]:
    """Build the headers that an ingress adds, with unique ids."""
    number = next(_numbers)
    return [
        f"X-Request-Id: {number:032x}",
        f"traceparent: 00-{number:032x}-{number:016x}-00",
        f"X-Forwarded-For: 10.0.0.{number % 256}",
        "X-Forwarded-Proto: https",
    ]


_numbers: Final = itertools.count(1)
REQUESTS: Final[dict[str, Callable[[bool], tuple[str, dict[str, Any]]]]] = {
    "openai": build_chat_request,
    "triton": build_generate_request,
    "varied": build_varied_request,
}


def get_worker_form(client: str, protocol: str) -> str:
    """Return the form of a worker's response to this client."""
    if protocol == "triton":
        return "generate"
    return {"openai": "chat", "varied": "tools"}.get(client, "completion")


def build_token_chunk(form: str, number: int) -> bytes:
    """Build one chunk with one event with one token."""
    text = f" token{number}."
    if form == "generate":
        fields: dict[str, Any] = {"model_name": "m", "model_version": "1", "text_output": text}
    elif form == "completion":
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        fields = {"id": "c-1", "object": "text_completion", "created": 1, "model": "mock"}
        fields["choices"] = [choice]
    else:
        delta: dict[str, Any] = {"content": text}
        if form == "tools":
            head = {"id": "call-1", "type": "function"} if number == 1 else {}
            function = {"arguments": text} | ({"name": "look"} if number == 1 else {})
            delta = {"tool_calls": [{"index": 0, **head, "function": function}]}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        fields = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
        fields["choices"] = [choice]
    return chunk(b"data: " + msgspec.json.encode(fields) + b"\n\n")


def build_stream_end(form: str) -> bytes:
    """Build the end of a worker's stream."""
    if form == "generate":
        return END
    ended = (
        build_token_chunk("chat" if form == "tools" else form, 0)
        .partition(b"data: ")[2]
        .removesuffix(b"\r\n")
    )
    ended = ended.replace(b'{"content":" token0."}', b"{}").replace(b'" token0."', b'""')
    ended = ended.replace(b"null", b'"tool_calls"' if form == "tools" else b'"stop"')
    return chunk(b"data: " + ended) + chunk(b"data: [DONE]\n\n") + END


def build_response(form: str) -> bytes:
    """Build a worker's unary response."""
    if form == "generate":
        fields: dict[str, Any] = {
            "model_name": "m",
            "model_version": "1",
            "text_output": " Jumped.",
        }
    else:
        message: dict[str, Any] = {"message": {"role": "assistant", "content": " Jumped."}}
        object_ = "chat.completion"
        if form == "completion":
            message, object_ = {"text": " Jumped."}, "text_completion"
        choice = {"index": 0, **message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        fields = {"id": "c-1", "object": object_, "created": 1, "model": "mock"}
        fields |= {"choices": [choice], "usage": usage}
    return make_reply(msgspec.json.encode(fields))


# --- worker and client, outside the gateway's thread ----------------------------------------------


class Worker:
    """Answers a POST with the pieces put into ``responses`` until None, and a GET at once."""

    def __init__(self) -> None:
        self.responses = queue.Queue[bytes | None]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        with one, one.makefile("rb") as lines:
            while method := lines.readline().partition(b" ")[0]:
                length = 0
                while (line := lines.readline().strip().lower()) != b"":
                    name, _, value = line.partition(b":")
                    length = int(value) if name == b"content-length" else length
                lines.read(length)
                if method == b"GET":
                    one.sendall(make_reply(b"{}"))
                    continue
                for response in iter(self.responses.get, None):
                    one.sendall(response)


class Client:
    """Sends requests over one connection, and counts the gateway's calls with ``calls``."""

    def __init__(self, port: int, worker: Worker, calls: Callable[[], int]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._worker = worker
        self._calls = calls

    def close(self) -> None:
        self._socket.close()

    def unary(self, client: str, protocol: str) -> int:
        """Return the calls for a request with a unary response."""
        before = self._wait_until_idle()
        self._ask(client, stream=False)
        self._worker.responses.put(build_response(get_worker_form(client, protocol)))
        self._worker.responses.put(None)
        self._read_until(b"Jumped.")
        return self._wait_until_idle() - before

    def stream(self, client: str, protocol: str) -> tuple[int, Sequence[int]]:
        """Return the calls for a stream's start and end, and for each token but the first.

        The first token arrives with the start of the stream and is counted there.
        """
        tokens, form = [], get_worker_form(client, protocol)
        before = self._wait_until_idle()
        self._ask(client, stream=True)
        self._token(CHUNKED + build_token_chunk(form, 1), 1)
        opened = now = self._wait_until_idle()
        for number in range(2, 2 + REPEATS):
            self._token(build_token_chunk(form, number), number)
            then, now = now, self._wait_until_idle()
            tokens.append(now - then)
        self._worker.responses.put(build_stream_end(form))
        self._worker.responses.put(None)
        self._read_until(b"0\r\n\r\n")
        return self._wait_until_idle() - now + opened - before, tokens

    def _ask(self, client: str, *, stream: bool) -> None:
        path, body = REQUESTS[client](stream)
        data = msgspec.json.encode(body)
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: gateway",
            "Content-Type: application/json",
            f"Authorization: Bearer {KEY}",
            f"Content-Length: {len(data)}",
            *(build_varied_headers() if client == "varied" else ()),
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + data)

    def _token(self, data: bytes, number: int) -> None:
        self._worker.responses.put(data)
        self._read_until(f"token{number}.".encode())

    def _read_until(self, wanted: bytes) -> None:
        data = b""
        while wanted not in data:
            received = self._socket.recv(1 << 16)
            assert received, data
            data += received

    def _wait_until_idle(self) -> int:
        """Return the count once the gateway is idle."""
        calls = -1
        while (now := self._calls()) != calls:
            calls = now
            time.sleep(0.01)
        return calls


# --- counting -------------------------------------------------------------------------------------


class CallCounter:
    """Counts the calls on the thread that enables it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: object, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1


class ModuleChangeCounter(CallCounter):
    """Counts calls in another module of the project than the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()
        """All modules with a call."""
        self._module = ""

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if event != "call":
            return
        module: str = frame.f_globals.get("__name__", "")
        if module != self._module and module.startswith(PACKAGES):
            self._module = module
            self.modules.add(module)
            self.calls += 1


async def measure_calls(
    client: str, protocol: str, folder: Path, counter: CallCounter | None = None
) -> Calls:
    """Run a gateway, send the requests, and count with ``counter``, by default the calls."""
    template = folder / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    worker = Worker()
    settings = f'profile: vllm\n    chat_template: "{template}"' if protocol == "triton" else ""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    text = CONFIG.format(protocol=protocol, more=settings, url=worker.url, digest=digest)
    outside, _, _ = set_up_metrics(build_services(), dict, "")
    now = ConfigSnapshot(load_text(text, "test.yaml", env={}), outside)
    [listener_id] = now.handlers
    listener = Listener(now.get_handler(listener_id), ServerLimitsConfig(connections=100))
    for backend in now.backends.values():
        await backend.start()
    port = await listener.listen("127.0.0.1", 0)
    used = CallCounter() if counter is None else counter
    caller = Client(port, worker, lambda: used.calls)
    sys.setprofile(used)
    try:
        return await asyncio.to_thread(count_fewest_calls, caller, client, protocol)
    finally:
        sys.setprofile(None)
        caller.close()
        await listener.drain(1)
        await listener.close()
        for backend in now.backends.values():
            await backend.aclose()
        worker.close()


def count_fewest_calls(caller: Client, client: str, protocol: str) -> Calls:
    """Return the lowest counts of several requests, after a first one that fills the caches."""
    caller.unary(client, protocol)
    caller.stream(client, protocol)
    unary_counts = [caller.unary(client, protocol) for _ in range(REPEATS)]
    streams = [caller.stream(client, protocol) for _ in range(REPEATS)]
    tokens = [token for _, each in streams for token in each]
    return Calls(min(unary_counts), min(begin for begin, _ in streams), min(tokens))


def find_deviations(measured_calls: Calls, stated: Calls) -> Iterator[str]:
    """Return the counts that differ from the table."""
    for name in Calls.__struct_fields__:
        calls, wanted = getattr(measured_calls, name), getattr(stated, name)
        if calls > wanted + ALLOWED_EXCESS:
            yield f"{name}: {calls} calls, {wanted} are stated: was it worth it?"
        elif calls < wanted * (1 - ALLOWED_SHORTFALL):
            yield f"{name}: {calls} calls, {wanted} are stated: well done, now state it"


@pytest.mark.parametrize(("client", "protocol"), STATED)
def test_hot_path_makes_the_stated_number_of_function_calls(
    client: str, protocol: str, tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        calls = runner.run(measure_calls(client, protocol, tmp_path))
    wrong = [*find_deviations(calls, STATED[client, protocol])]
    assert not wrong, f"{wrong}\nSTATED in this file would be {calls}"


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        (Calls(100, 100, 100), 0),
        (Calls(95, 100, 95), 0),
        (Calls(104, 100, 100), 0),
        (Calls(105, 100, 100), 1),
        (Calls(100, 94, 105), 2),
    ],
)
def test_call_count_check_reports_more_calls_and_many_fewer_calls(calls: Calls, wrong: int) -> None:
    assert len([*find_deviations(calls, Calls(100, 100, 100))]) == wrong


def print_counts() -> None:
    """Print calls, module changes and modules for each pair of protocols."""
    print(f"{'':>20} {'calls':>22} {'changes of module':>22} {'modules':>8}")  # noqa: T201
    print(f"{'':>20} {' '.join(['  unary stream token'] * 2)}")  # noqa: T201
    for client, protocol in STATED:
        counts = []
        for counter in (CallCounter(), changes := ModuleChangeCounter()):
            with (
                TemporaryDirectory() as folder,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                counts.append(runner.run(measure_calls(client, protocol, Path(folder), counter)))
        row = "   ".join(f"{one.unary:6} {one.stream:6} {one.token:5}" for one in counts)
        print(f"{client + ' to ' + protocol:>20} {row} {len(changes.modules):8}")  # noqa: T201


if __name__ == "__main__":
    print_counts()
