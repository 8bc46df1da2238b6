"""The probes find the one flaw of each worker."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from gateway.tools.probe import report
from tests.probe.test_probes import StubWorkerServer, create_adapter, filter_outcomes, probe_worker
from tests.support.fakes import CHUNKED, ReceivedRequest, chunk, chunked, make_reply

JsonObject = dict[str, Any]
_encode = msgspec.json.encode


class FlawedWorker(Struct):
    """A chat worker that echoes the prompt word by word, with one flaw."""

    flaw: str = ""
    numbers: Any = msgspec.field(default_factory=itertools.count)

    def __call__(self, request: ReceivedRequest) -> bytes:
        match request.method, request.path:
            case "GET", "/v1/models":
                status = "503 Service Unavailable" if self.flaw == "never ready" else "200 OK"
                return make_reply(b'{"object":"list","data":[]}', status)
            case "POST", "/v1/chat/completions":
                return self._chat(request)
            case "POST", "/v1/embeddings":
                return self._vectors(msgspec.json.decode(request.body))
            case _:
                return self._refuse("no such path", "404 Not Found")

    def _chat(self, request: ReceivedRequest) -> bytes:
        try:
            body = msgspec.json.decode(request.body, type=JsonObject)
            words = str(body["messages"][-1]["content"] or "").split()
            assert isinstance(body.get("temperature", 1.0), int | float)
            assert isinstance(_read_limit(body), int)
            assert isinstance(body["messages"][-1]["content"], str)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, AssertionError):
            failed = self.flaw == "fails at bad input"
            return self._refuse("bad", "500 Internal Server Error" if failed else "400 Bad Request")
        for field in ("n", "stop", "logprobs", "top_p"):
            if self.flaw == f"refuses {field}" and field in body:
                return self._refuse(f"there is no {field} here")
        if body["model"] != "parrot":
            return self._refuse("no such model", "404 Not Found")
        return self._answer(body, [f" {one}" if i else one for i, one in enumerate(words)])

    def _refuse(self, text: str, status: str = "400 Bad Request") -> bytes:
        return make_reply(_encode({"error": {"message": text, "type": "x", "code": None}}), status)

    def _answer(self, body: JsonObject, tokens: list[str]) -> bytes:
        stream, most = body.get("stream", False), _read_limit(body)
        if self.flaw == "no two the same":
            tokens = [f"{next(self.numbers)}", *tokens]
        if self.flaw == "draws as it likes" and body.get("temperature"):
            tokens = [f"{next(self.numbers)}", *tokens]
        if self.flaw == "a stream of its own" and stream:
            tokens = ["so", *tokens]
        sent = tokens if self.flaw == "knows no limit" else tokens[:most]
        reason = "length" if len(tokens) > len(sent) else "stop"
        for stop in body.get("stop", ()) if self.flaw != "knows no stop" else ():
            text = "".join(sent)
            if stop in text:
                end = text.index(stop) + (len(stop) if self.flaw == "leaves the stop" else 0)
                sent, reason = list(re.findall(r" ?\S*", text[:end]))[:-1], "stop"
        if self.flaw == "always says stop":
            reason = "stop"
        if self.flaw == "always says length":
            reason = "length"
        counts = [len(tokens) or 1, len(sent) or 1]
        n = 1 if self.flaw == "knows no n" else body.get("n", 1)
        return (self._stream if stream else self._whole)(body, n, (sent, reason), counts)

    def _whole(
        self, fields: JsonObject, n: int, answer: tuple[list[str], str], counts: list[int]
    ) -> bytes:
        tokens, reason = answer
        message = {"role": "assistant", "content": self._garbled("".join(tokens))}
        choice: JsonObject = {"message": message, "finish_reason": reason}
        if fields.get("tools") and fields.get("tool_choice") == "required":
            broken = self.flaw == "writes broken arguments"
            call = {"name": "get_weather", "arguments": '{"city"' if broken else '{"city":"x"}'}
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]  # type: ignore[assignment]
            choice["finish_reason"] = "tool_calls"
        if fields.get("logprobs"):
            value = 0.7 if self.flaw == "weighs above one" else -0.5
            choice["logprobs"] = {"content": [{"token": t, "logprob": value} for t in tokens]}
        body: JsonObject = {"id": "a", "choices": [choice | {"index": i} for i in range(n)]}
        if self.flaw != "does not count":
            body["usage"] = self._usage(counts)
        kind = "text/plain" if self.flaw == "calls it text" else "application/json"
        return make_reply(_encode(body), content_type=kind)

    def _stream(
        self, _body: JsonObject, n: int, answer: tuple[list[str], str], counts: list[int]
    ) -> bytes:
        tokens, reason = answer
        events: list[Any] = [
            {"choices": [{"index": i, "delta": {"content": self._garbled(token)}}]}
            for i in range(n)
            for token in tokens
        ]
        if self.flaw == "cuts streams":
            return CHUNKED + b"".join(chunk(_encode_event(one)) for one in events)
        if self.flaw == "forgets the end":
            return chunked(*map(_encode_event, events))
        events += [
            {"choices": [{"index": i, "delta": {}, "finish_reason": reason}]} for i in range(n)
        ]
        if self.flaw != "does not count":
            events.append({"choices": [], "usage": self._usage(counts)})
        return chunked(*map(_encode_event, events), b"data: [DONE]\n\n")

    def _garbled(self, text: str) -> str:
        match self.flaw:
            case "encodes twice":
                return text.encode().decode("latin-1")
            case "splits letters":
                return re.sub("[^\x00-\x7f]", "\ufffd", text)
            case _:
                return text

    def _usage(self, counts: list[int]) -> JsonObject:
        prompt, completion = counts
        if self.flaw == "counts wrong":
            completion *= 1000
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 1}

    def _vectors(self, body: JsonObject) -> bytes:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        vectors = [[float(len(text)), float(text.count("e") ** 2), 1.0] for text in texts]
        if self.flaw == "mixes vectors":
            vectors.reverse()
        if self.flaw == "loses vectors":
            vectors = vectors[:1]
        data = [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        return make_reply(_encode({"data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}}))


def _read_limit(body: JsonObject) -> Any:
    """Return max_tokens by either of its names, by default 100."""
    return body.get("max_completion_tokens", body.get("max_tokens", 100))


def _encode_event(what: Any) -> bytes:
    return b"data: " + _encode(what) + b"\n\n"


FLAWS: list[tuple[str, str, str, str]] = [
    # the flaw, the probe that finds it, its finding, and the unsupported fields
    ("never ready", "health", "/v1/models is answered 503", ""),
    ("does not count", "usage-whole", "the response has no usage", ""),
    ("does not count", "usage-stream", "the response has no usage", ""),
    ("counts wrong", "usage-whole", "completion tokens for", ""),
    ("always says stop", "reason-length", "expected length, got (stop|eos)", ""),
    ("always says stop", "reason-length-stream", "expected length, got (stop|eos)", ""),
    ("always says length", "end", "finish reason length at 2 tokens of 200", ""),
    ("knows no limit", "length-3", "15 tokens where 3 were allowed", "stopping.max_tokens"),
    ("leaves the stop", "stop", "is in the text", "stopping.stop"),
    ("knows no stop", "stop-stream", "continues after the stop string", "stopping.stop"),
    ("knows no stop", "stop-across", "continues after the stop string", "stopping.stop"),
    ("cuts streams", "stream", "connection broke", ""),
    ("forgets the end", "stream", "stopped before its end", ""),
    ("a stream of its own", "stream-is-whole", "they differ from character 0", ""),
    ("no two the same", "greedy", "3 different texts of three greedy responses", ""),
    ("no two the same", "seed", "even greedy responses differ", ""),
    ("draws as it likes", "seed", "the same seed gives different answers", "sampling.seed"),
    ("draws as it likes", "top-p", "3 different answers", "sampling.top_p"),
    ("encodes twice", "accents", "encoded twice", ""),
    ("splits letters", "emoji-stream", "characters are broken", ""),
    ("fails at bad input", "not-json", "expected a client error, got 500", ""),
    ("fails at bad input", "temperature-is-a-text", "expected a client error, got 500", ""),
    ("knows no n", "n", "lacks choice 1", "n"),
    ("knows no n", "n-stream", "lacks choice 1", "n"),
    ("weighs above one", "logprobs", "one is above 0", "logprobs"),
    ("writes broken arguments", "tool-required", "arguments are not JSON", "tools"),
    ("calls it text", "content-types", "is called 'text/plain'", ""),
    ("mixes vectors", "embedding-order", "they are in another order", "inputs"),
    ("loses vectors", "embedding-batch", "lacks vector", "inputs"),
]


@pytest.mark.parametrize(("flaw", "probe", "message", "fields"), FLAWS)
async def test_probe_detects_a_worker_flaw(
    flaw: str, probe: str, message: str, fields: str
) -> None:
    async with StubWorkerServer(FlawedWorker(flaw)).serving() as worker:
        results = await probe_worker(
            worker.url, create_adapter("openai"), only=probe, embedder="parrot"
        )

    assert results[probe].outcome == "failed"
    assert re.search(message, results[probe].detail)
    assert " ".join(results[probe].fields) == fields


@pytest.mark.parametrize("probe", sorted({probe for _, probe, _, _ in FLAWS}))
async def test_probe_passes_for_a_worker_without_flaw(probe: str) -> None:
    async with StubWorkerServer(FlawedWorker()).serving() as worker:
        results = await probe_worker(
            worker.url, create_adapter("openai"), only=probe, embedder="parrot"
        )

    assert results[probe].outcome == "passed", results[probe].detail


@pytest.mark.parametrize(
    ("field", "probe", "path"),
    [("n", "n", "n"), ("stop", "stop", "stopping.stop"), ("top_p", "top-p", "sampling.top_p")],
)
async def test_rejected_parameter_passes_and_is_listed_as_unsupported(
    field: str, probe: str, path: str
) -> None:
    async with StubWorkerServer(FlawedWorker(f"refuses {field}")).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), only=f"whole {probe}")

    assert results[probe].outcome == "passed"
    assert results[probe].detail.startswith("rejected: 400: ")
    assert report.unsupported_fields(list(results.values())) == [path]


async def test_failing_worker_yields_no_unsupported_parameters() -> None:
    def broken(_: ReceivedRequest) -> bytes:
        return make_reply(b"oops", "500 Internal Server Error")

    async with StubWorkerServer(broken).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"))

    assert not filter_outcomes(results, "passed").keys() - {"wrong-path"}
    assert report.unsupported_fields(list(results.values())) == []


async def test_swapped_concurrent_responses_are_detected() -> None:
    """Each concurrent request gets the response to the one before it."""
    good = FlawedWorker()
    received: list[ReceivedRequest] = []

    def mixed(request: ReceivedRequest) -> bytes:
        received.append(request)
        return good(received[-1] if len(received) <= 4 else received[-2])

    async with StubWorkerServer(mixed).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), only="apart")

    assert results["apart"].outcome == "failed"
    assert re.search("is the one to question|has words of others", results["apart"].detail)


async def test_worker_with_overload_rejections_passes() -> None:
    busy = b'{"error":{"message":"busy","type":"x","code":null}}'
    good, count = FlawedWorker(), itertools.count()

    def turns_away(request: ReceivedRequest) -> bytes:
        if next(count) % 2:
            return make_reply(busy, "429 Too Many Requests", retry_after="1")
        return good(request)

    async with StubWorkerServer(turns_away).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), only="at-once")

    assert results["at-once"].outcome == "passed"
    assert results["at-once"].detail == "4 answered, 4 rejected as overload"
    assert results["at-once"].quirks == ("of 8 requests at once 4 are rejected",)


Respond = Callable[[ReceivedRequest], bytes]


async def test_closed_connections_are_accepted_only_if_announced() -> None:
    good = FlawedWorker()

    def once(request: ReceivedRequest) -> bytes:
        head, _, rest = good(request).partition(b"\r\n")
        return head + b"\r\nconnection: close\r\n" + rest

    def silently(request: ReceivedRequest) -> bytes:
        return good(request) + b"\n"

    for respond, outcome in ((once, "passed"), (silently, "failed")):
        async with StubWorkerServer(respond).serving() as worker:
            results = await probe_worker(worker.url, create_adapter("openai"), only="keep-alive")
        assert results["keep-alive"].outcome == outcome


async def test_too_large_response_is_not_read_completely() -> None:
    def endless(_: ReceivedRequest) -> bytes:
        return make_reply(b'{"x":"' + b"a" * (9 << 20) + b'"}')

    async with StubWorkerServer(endless).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), only="whole health")

    assert results["whole"].outcome == "failed"
    assert "larger than" in results["whole"].detail


async def test_accepting_any_model_name_is_reported_as_a_quirk() -> None:
    good = FlawedWorker()

    def any_name(request: ReceivedRequest) -> bytes:
        named = request.body.replace(b"interlingua-no-such-model", b"parrot")
        return good(msgspec.structs.replace(request, body=named))

    async with StubWorkerServer(any_name).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), only="model-unknown")

    assert results["model-unknown"].outcome == "passed"
    assert report.collect_quirks(list(results.values())) == {
        "model-unknown": "any model name is accepted"
    }


async def test_malformed_responses_do_not_abort_the_probes() -> None:
    """Each probe has a verdict in time, whatever the worker sends."""
    numbers = itertools.count()
    replies = [
        b"HTTP/1.1 200 OK\r\n\r\nx",
        b"garbage\r\n\r\nx",
        make_reply(b"[]"),
        make_reply(b"null"),
        make_reply(b'{"choices":5}'),
        chunked(b"data: 5\n\n"),
        chunked(b"\xff\xfe"),
    ]

    def odd(_: ReceivedRequest) -> bytes:
        return replies[next(numbers) % len(replies)]

    async with StubWorkerServer(odd).serving() as worker:
        results = await probe_worker(worker.url, create_adapter("openai"), embedder="parrot")

    assert {one.outcome for one in results.values()} <= {"passed", "failed", "not offered"}
    assert results["stream-is-whole"].outcome == "failed"
    assert report.unsupported_fields(list(results.values())) == []
