"""Attacks a gateway, and prints what each attack cost: make attack.

python -m tests.attack [NAME …] [--redis] [--into docs/threats.md]

Without names it runs all attacks, and those on stored responses and rate limits with Redis again:
about ten minutes on two busy cores.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, closing, nullcontext
from functools import partial
from pathlib import Path

import httpx

from tests.attack.measurement import Measurement, measure
from tests.fault.gateway_process import GatewayProcess
from tests.support.fakes import ScriptedWorker, chunk, chunked, make_reply
from tests.support.redis_server import RedisServer
from tests.support.slow_readers import (
    FloodingWorker,
    open_unread_stream,
    run_flooding_worker,
    wait_until_blocked,
)
from tests.support.waiting import wait_until

_CONFIG = """
listeners: [{{address: "127.0.0.1:0", protocols: [openai]}}]
limits: {{shutdown_delay: 1s}}
stored_responses: {store}
backends:
  script: {{kind: echo, script: [a, b]}}
  long: {{kind: echo, script: ["{text}"]}}
  flood: {{protocol: openai, workers: ["{worker}"], health: {{interval: 1h}}}}
  answers: {{protocol: openai, workers: ["{answers}"], health: {{interval: 1h}}}}
  responses:
    protocol: openai
    workers: ["{answers}"]
    health: {{interval: 1h}}
    options: {{worker_api: responses}}
  ranks: {{kind: echo}}
models:
  small: {{backend: script}}
  stored: {{backend: long}}
  large: {{backend: flood}}
  limited: {{backend: script}}
  answered: {{backend: answers}}
  embedded: {{backend: answers, task: embedding}}
  responding: {{backend: responses}}
  ranked: {{backend: ranks, task: rerank}}
defaults: {{limits: {{models: {{limited: {{requests: 60/min}}}}}}}}
{state}
"""
_TIMEOUT = 120.0
_DELTA = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":'
    b'0,"delta":{"content":"%b"}}]}\n\n'
) % (b"x" * 200)
_PIECE = chunk(_DELTA * 64)
_STREAM_SIZE = 64 << 20
_SMALL_BODY = b'{"model":"small","messages":[{"role":"user","content":"hi"}]}'
_BODY = b'{"model":"large","stream":true,"messages":[{"role":"user","content":"hi"}]}'
_ANSWERED = _SMALL_BODY.replace(b"small", b"answered")


class Target:
    """The gateway under attack, and its worker."""

    def __init__(
        self,
        gateway: GatewayProcess,
        worker: FloodingWorker,
        answer: list[bytes],
        stack: AsyncExitStack,
    ) -> None:
        self.gateway = gateway
        """The one that serves now: a handover replaces it."""
        self.worker = worker
        self.answer = answer
        """The response of a worker, in pieces."""
        self.stack = stack
        """Closed after the measurement."""
        self.url = gateway.urls[0]
        self.port = int(self.url.rpartition(":")[2])

    def get_pid(self) -> int:
        """The process of the gateway."""
        return self.gateway.process.pid

    async def post(self, path: str, body: bytes) -> str:
        """Send a request; returns the status."""
        async with httpx.AsyncClient(timeout=_TIMEOUT) as client:
            headers = {"content-type": "application/json"}
            response = await client.post(self.url + path, content=body, headers=headers)
            return str(response.status_code)


async def leave_streams_unread(target: Target, clients: int = 200) -> str:
    """200 clients read nothing of a long stream."""
    async with AsyncExitStack() as stack:
        for _ in range(clients):
            client = open_unread_stream(target.port, "/v1/chat/completions", _BODY)
            stack.enter_context(closing(client))
            await asyncio.sleep(0.002)
        await wait_until_blocked(target.worker, 0.5)
    return f"the worker sent {target.worker.sent >> 20} MiB"


async def leave_many_streams_unread(target: Target) -> str:
    """2,000 clients read nothing of a long stream."""
    return await leave_streams_unread(target, 2000)


async def send_slowly(target: Target) -> str:
    """2,000 clients send a byte of a request each second."""
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"
    writers = list[asyncio.StreamWriter]()
    for _ in range(2000):
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(start)
        writers.append(writer)
    for _ in range(10):
        for writer in writers:
            writer.write(b"{")
        await asyncio.sleep(1)
    closed = sum(writer.is_closing() for writer in writers)
    for writer in writers:
        writer.transport.abort()
    return f"{closed} closed"


async def name_one_item_often(target: Target) -> str:
    """A request of 14 KiB names a stored item of 1 MiB 200 times."""
    async with httpx.AsyncClient(base_url=target.url, timeout=_TIMEOUT) as client:
        body = {"model": "stored", "input": "x"}
        stored = (await client.post("/v1/responses", json=body)).json()
    item = {"type": "item_reference", "id": stored["output"][0]["id"]}
    again = json.dumps({"model": "small", "input": [item] * 200}).encode()
    return await target.post("/v1/responses", again)


async def replay_histories(target: Target) -> str:
    """Eight requests of 100 bytes at once continue a stored conversation of 16 MiB."""
    async with httpx.AsyncClient(base_url=target.url, timeout=_TIMEOUT) as client:
        body = {"model": "stored", "input": "x" * (1 << 20)}
        for _ in range(8):
            stored = (await client.post("/v1/responses", json=body)).json()
            body["previous_response_id"] = stored["id"]
    data = json.dumps(body | {"model": "small", "input": "x", "store": False}).encode()
    statuses = await asyncio.gather(*(target.post("/v1/responses", data) for _ in range(8)))
    return count_words(statuses)


async def exceed_rate_limit(target: Target) -> str:
    """2,000 requests of eight clients exceed a rate limit of 60 a minute."""
    body = _SMALL_BODY.replace(b"small", b"limited")

    async def send_requests() -> list[str]:
        return [await target.post("/v1/chat/completions", body) for _ in range(250)]

    statuses = await asyncio.gather(*(send_requests() for _ in range(8)))
    return count_words(status for some in statuses for status in some)


def count_words(words: Iterable[str]) -> str:
    """Each word with its number."""
    return ", ".join(f"{word}: {count}" for word, count in sorted(Counter(words).items()))


async def send_many_parts(target: Target) -> str:
    """Bodies of 19,000 parts, which is below the limit, one after the other."""
    parts = [{"type": "text", "text": "x"}] * 19_000
    body = {"model": "small", "messages": [{"role": "user", "content": parts}]}
    data = json.dumps(body).encode()
    return ", ".join([await target.post("/v1/chat/completions", data) for _ in range(3)])


async def send_many_values(target: Target) -> str:
    """A body of 8 MiB with four million token ids."""
    data = b'{"model":"small","prompt":[' + b"1," * (4 << 20) + b"1]}"
    return await target.post("/v1/completions", data)


def build_answer(message: str, choices: int) -> bytes:
    """A unary response with so many choices."""
    choice = f'{{"index":%d,"message":{{"role":"assistant",{message}}},"finish_reason":"stop"}}'
    listed = ",".join(choice % number for number in range(choices))
    start = '"id":"1","object":"chat.completion","created":1,"model":"m"'
    return make_reply(f'{{{start},"choices":[{listed}]}}'.encode())


def build_calls(count: int) -> str:
    """So many tool calls, of three objects each with the list's."""
    call = '{"id":"c%d","type":"function","function":{"name":"f","arguments":"{}"}}'
    return f'"tool_calls":[{",".join(call % number for number in range(count))}]'


async def answer_many_calls(target: Target) -> str:
    """A worker answers with 100,000 tool calls, four times."""
    target.answer[:] = [build_answer(build_calls(100_000), 1)]
    return ", ".join([await target.post("/v1/chat/completions", _ANSWERED) for _ in range(4)])


async def answer_some_calls(target: Target) -> str:
    """A worker answers with 66,000 tool calls, which is below the limit, four times."""
    target.answer[:] = [build_answer(build_calls(66_000), 1)]
    return ", ".join([await target.post("/v1/chat/completions", _ANSWERED) for _ in range(4)])


async def stream_many_calls(target: Target) -> str:
    """A worker's stream has an event with 50,000 tool calls, four times."""
    data = build_answer(build_calls(50_000), 1).partition(b"\r\n\r\n")[2]
    data = data.replace(b'"message"', b'"delta"')
    target.answer[:] = [chunked(_DELTA, b"data: %b\n\n" % data)]
    body = _ANSWERED.replace(b"{", b'{"stream":true,', 1)
    return ", ".join([await target.post("/v1/chat/completions", body) for _ in range(4)])


async def answer_vectors(target: Target) -> str:
    """A worker answers with 2,048 vectors of 3,072 numbers, 126 MiB, twice."""
    vector = ",".join(["-0.012345678901234567"] * 3072)
    item = f'{{"object":"embedding","index":%d,"embedding":[{vector}]}}'
    listed = ",".join(item % number for number in range(2048))
    target.answer[:] = [make_reply(f'{{"object":"list","model":"m","data":[{listed}]}}'.encode())]
    body = json.dumps({"model": "embedded", "input": ["x"] * 2048}).encode()
    return ", ".join([await target.post("/v1/embeddings", body) for _ in range(2)])


async def exhaust_memory(target: Target) -> str:
    """40 clients at once get an answer of 20 MiB, more than limits.memory together; then one."""
    target.answer[:] = [build_answer(f'"content":"{"x" * (20 << 20)}"', 1)]
    path = "/v1/chat/completions"

    async def send() -> str:
        try:
            return await target.post(path, _ANSWERED)
        except httpx.HTTPError:  # the slowest ones make room
            return "closed"

    statuses = await asyncio.gather(*(send() for _ in range(40)))
    return f"{count_words(statuses)}; then {await target.post(path, _ANSWERED)}"


async def stream_unknown_elements(target: Target) -> str:
    """A worker's stream has two events with 190,000 unknown elements."""
    part = {"type": "unknown", "number": 1}
    item = {"type": "message", "id": "m", "role": "assistant", "content": [part] * 190_000}
    text = {"type": "response.output_text.delta", "item_id": "m", "delta": "x"}
    done = {"type": "response.output_item.done", "output_index": 0, "item": item}
    end = {"type": "response.completed", "response": {"id": "r", "output": [item]}}
    events = (json.dumps(event).encode() for event in (text, done, end))
    target.answer[:] = [chunked(*(b"data: %b\n\n" % event for event in events))]
    body = _ANSWERED.replace(b"answered", b"responding").replace(b"{", b'{"stream":true,', 1)
    return await target.post("/v1/chat/completions", body)


async def answer_many_choices(target: Target) -> str:
    """A worker answers with 100,000 choices, four times."""
    target.answer[:] = [build_answer('"content":"x"', 100_000)]
    return ", ".join([await target.post("/v1/chat/completions", _ANSWERED) for _ in range(4)])


async def rank_large_documents(target: Target) -> str:
    """Documents of 20 MB are ranked by a script, twice."""
    documents = ["word " * 20_000] * 200
    data = json.dumps({"model": "ranked", "query": "word", "documents": documents}).encode()
    return ", ".join([await target.post("/v1/rerank", data) for _ in range(2)])


async def send_large_heads(target: Target) -> str:
    """2,000 requests of eight clients have a head of 1 MiB, as one header or as many."""
    heads = (b"x: " + b"y" * (1 << 20), b"x: y\r\n" * (1 << 17) + b"x: y")
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"

    async def send_heads() -> list[str]:
        return [await send_head(start + heads[number % 2]) for number in range(250)]

    async def send_head(data: bytes) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        writer.write(data + b"\r\n\r\n")
        try:
            return (await reader.readline()).decode().split(" ")[1]
        except ConnectionError:  # it arrived before the status
            return "closed"
        finally:
            writer.transport.abort()

    statuses = await asyncio.gather(*(send_heads() for _ in range(8)))
    return count_words(status for some in statuses for status in some)


async def reload_often(target: Target) -> str:
    """The configuration changes, and SIGHUP comes, 100 times a second for five seconds."""
    text = target.gateway.file.read_text(encoding="utf-8")
    for number in range(500):
        target.gateway.file.write_text(f"{text}\n# {number}\n", encoding="utf-8")
        target.gateway.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(0.01)
    return "served" if target.gateway.process.poll() is None else "ended"


async def name_images(target: Target) -> str:
    """500 requests name the URL of an image, which no gateway fetches."""
    connections = list[object]()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
    body = {"model": "small", "messages": [{"role": "user", "content": [part]}]}
    data = json.dumps(body).encode()
    async with server:
        for _ in range(500):
            await target.post("/v1/chat/completions", data)
    return f"{len(connections)} connections to its server"


async def replace_often(target: Target) -> str:
    """Five handovers in a row, while four clients send requests on kept and on new connections."""
    first, over = target.gateway, asyncio.Event()
    statuses = list[str]()

    async def send_requests(*, keep: bool) -> None:
        headers = {} if keep else {"connection": "close"}
        async with httpx.AsyncClient(timeout=_TIMEOUT, headers=headers) as client:
            while not over.is_set():
                try:
                    url = target.url + "/v1/chat/completions"
                    response = await client.post(url, json=json.loads(_SMALL_BODY))
                    statuses.append(str(response.status_code))
                except httpx.HTTPError as error:
                    statuses.append(type(error).__name__)

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(send_requests(keep=number % 2 == 0))
        for _ in range(5):
            folder = Path(tempfile.mkdtemp(dir=first.file.parent))
            options = _build_handover(str(first.file.parent))
            following = GatewayProcess(folder, "", *options, file=first.file)
            await target.stack.enter_async_context(following)
            replaced, target.gateway = target.gateway, following
            await wait_until(lambda: replaced.process.poll() is not None, _TIMEOUT)  # noqa: B023
        over.set()
    return count_words(statuses)


ATTACKS: dict[str, Callable[[Target], Awaitable[str]]] = {
    "unread-streams": leave_streams_unread,
    "many-unread-streams": leave_many_streams_unread,
    "slow-clients": send_slowly,
    "references": name_one_item_often,
    "histories": replay_histories,
    "rate-limit": exceed_rate_limit,
    "many-parts": send_many_parts,
    "many-values": send_many_values,
    "many-calls": answer_many_calls,
    "some-calls": answer_some_calls,
    "many-calls-in-an-event": stream_many_calls,
    "unknown-elements": stream_unknown_elements,
    "vectors": answer_vectors,
    "exhausted-memory": exhaust_memory,
    "many-choices": answer_many_choices,
    "large-documents": rank_large_documents,
    "large-heads": send_large_heads,
    "reloads": reload_often,
    "image-urls": name_images,
    "handovers": replace_often,
}


async def run_attack(name: str, redis_url: str) -> Measurement:
    """Run one attack against a gateway of its own."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        worker = await stack.enter_async_context(run_flooding_worker(_PIECE, _STREAM_SIZE))
        store = f"{{redis: '{redis_url}'}}" if redis_url else f"{{sqlite: '{folder}/r.db'}}"
        state = f"state: {{redis: '{redis_url}'}}" if redis_url else ""
        answer: list[bytes] = []
        answers = await stack.enter_async_context(ScriptedWorker(answer))
        urls = {"worker": worker.url, "answers": answers.url}
        text = _CONFIG.format(**urls, store=store, state=state, text="x" * (1 << 20))
        gateway = await stack.enter_async_context(
            GatewayProcess(Path(folder), text, *_build_handover(folder))
        )
        target = Target(gateway, worker, answer, stack)
        return await measure(target.get_pid, target.url, partial(ATTACKS[name], target))


def _build_handover(folder: str) -> tuple[str, str]:
    """The options of a gateway that gives its sockets to the next one."""
    return "--handover", f"{folder}/handover"


BEFORE = {
    "unread-streams": "445 MiB, 31 s",
    "references": "458 MiB, 1.7 s",
    "histories": "1,411 MiB, 11 s",
    "many-parts": "47 MiB, 89 ms",
    "many-values": "413 for its size: the limit was 8 MiB",
    "some-calls": "176 MiB, 121 ms",
    "unknown-elements": "0.6 s for the report alone",
    "vectors": "502 for its size: the limit was 32 MiB",
    "exhausted-memory": "1,090 MiB, 146 ms",
    "many-choices": "0.22 s",
    "large-documents": "0.22 s",
    "reloads": "62 MiB, 0.25 s",
    "image-urls": "47 MiB, 0.14 s",
}
"""The peak and the longest response of releases before there was a limit, where they are known."""
_HEADER = (
    "| attack | without these limits (a release before them): peak, longest "
    "| now: memory before → peak | longest response: before → during; not waiting for a CPU "
    "| outcome now |"
)


def write_table(file: Path, rows: Iterable[str]) -> None:
    """Replace the table in a page. Raises ValueError if it has none."""
    before, header, rest = file.read_text("utf-8").partition(_HEADER)
    if not header:
        raise ValueError(f"{file} has no table of attacks")
    _, blank_line, after = rest.partition("\n\n")
    table = "\n".join((_HEADER, "|---|---|---|---|---|", *rows))
    file.write_text(before + table + blank_line + after, "utf-8")


def format_row(name: str, result: Measurement, *, uses_redis: bool = False) -> str:
    """A row of the table of ``docs/threats.md``."""
    text = (ATTACKS[name].__doc__ or "").strip().rstrip(".") + " (Redis)" * uses_redis
    before = "" if uses_redis else BEFORE.get(name, "")
    return (
        f"| {text} | {before} "
        f"| {result.memory_before >> 20} → {result.memory_peak >> 20} MiB "
        f"| {1000 * result.delay_before:.0f} → {1000 * result.longest_delay:.0f} ms; "
        f"{1000 * result.longest_on_cpu:.0f} ms | {result.outcome} |"
    )


WITH_REDIS = ("references", "histories", "rate-limit")
"""The attacks on what Redis may hold."""


def main() -> int:
    """Print a table; the exit code tells whether another client's request failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    text = "keep responses and rate limits in a Redis, which is started"
    parser.add_argument("--redis", action="store_true", help=text)
    text = "write the table into this page, too"
    parser.add_argument("--into", type=Path, metavar="FILE", help=text)
    options = parser.parse_args()
    runs = [(name, options.redis) for name in options.names or ATTACKS]
    if not (options.names or options.redis):
        runs += [(name, True) for name in WITH_REDIS]
    failed, rows = 0, list[str]()
    print(_HEADER)  # noqa: T201
    print("|---|---|---|---|---|", flush=True)  # noqa: T201
    for name, uses_redis in runs:
        with RedisServer() if uses_redis else nullcontext() as redis:
            result = asyncio.run(run_attack(name, redis.url if redis else ""))
        failed += result.failed
        rows.append(format_row(name, result, uses_redis=uses_redis))
        print(rows[-1], flush=True)  # noqa: T201
    if options.into is not None:
        write_table(options.into, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
