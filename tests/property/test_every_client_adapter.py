"""Properties of every client protocol of the registry."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interfaces import Deadline, RequestContext, ignore_memory
from gateway.config.registry import load_symbol
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core import errors
from protocols.core.aggregate import aggregate
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import ClientAdapter, ClientRequest, Endpoint, ResponseContext
from protocols.core.json_text import MAX_DEPTH
from protocols.core.request import AnyRequest, GenerationRequest

_PARAM = re.compile(r"\{(\w+)\}")


def clock() -> float:
    return 0.0


CONTEXT = RequestContext("r", Deadline(clock, 60), clock, ignore_memory)
ABOUT = ResponseContext("r", 1_700_000_000, "m", "1", "w", CONTEXT.clock)


def list_profiles() -> Iterator[Any]:
    """Return each client protocol in each of its profiles."""
    for name, reference in PROTOCOLS.items():
        kind = load_symbol(reference)
        for profile in kind.profiles if hasattr(kind, "read_routing_info") else ():
            yield pytest.param(build_adapter(name, profile, {}), id=f"{name}-{profile}")


PROFILES = list(list_profiles())
every_adapter = pytest.mark.parametrize("adapter", PROFILES)


def create_client_request(
    endpoint: Endpoint, body: bytes, headers: Mapping[str, str] | None = None
) -> ClientRequest:
    params = {name: "1" if name == "version" else "m" for name in _PARAM.findall(endpoint.path)}
    path = endpoint.path.format(**params)
    sent = {"content-type": "application/json", **(headers or {})}
    return ClientRequest(endpoint, params, sent, "", body, path)


def list_generate_endpoints(adapter: ClientAdapter) -> list[Endpoint]:
    return [one for one in adapter.endpoints if one.task == "generate"]


# --- requests -------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
WORDS = [
    "model", "messages", "prompt", "input", "inputs", "input_id", "text_input", "parameters",
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_new_tokens",
    "temperature", "top_p", "top_k", "n", "best_of", "stop", "seed", "logprobs", "top_logprobs",
    "tools", "tool_choice", "functions", "function_call", "response_format", "echo", "suffix", "id",
    "details", "logit_bias", "extra_params", "instruction", "encoding_format", "dimensions",
    "sampling_parameters", "outputs", "role", "content", "do_sample", "priority", "timeout",
    "instructions", "include", "text", "reasoning", "previous_response_id", "max_output_tokens",
    "metadata", "client_metadata", "store", "truncation",
    "query", "documents", "rank_fields", "top_n", "passages", "queries", "text_1", "text_2",
    "tokens",
]  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "bot"])},
        optional={"content": anything, "tool_calls": anything, "tool_call_id": anything},
    ),
    max_size=3,
)
items = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from([
            "message", "function_call", "function_call_output", "custom_tool_call", "reasoning",
            "custom_tool_call_output", "item_reference", "additional_tools", "tool_search_call",
            "tool_search_output", "web_search_call", "nope",
        ])},
        optional={
            "role": st.sampled_from(["user", "developer", "assistant", "bot"]),
            "content": anything | st.lists(st.dictionaries(
                st.sampled_from(["type", "text", "image_url", "refusal"]),
                st.sampled_from(["input_text", "output_text", "refusal", "input_image"]),
            ), max_size=2),
            "call_id": st.sampled_from(["a", "b"]) | scalars,
            "name": st.sampled_from(["f", "g"]) | scalars,
            "arguments": anything, "input": anything, "output": anything, "tools": anything,
            "id": anything, "encrypted_content": anything, "summary": anything,
        },
    ),
    max_size=4,
)  # fmt: skip
bodies = st.builds(
    lambda pair, text, rest: {**pair, **text, **rest},
    st.dictionaries(st.sampled_from(WORDS), anything, max_size=8),
    st.fixed_dictionaries(
        {},
        optional={
            "messages": messages,
            "prompt": st.text(max_size=9),
            "input": items | st.text(max_size=9),
            "model": st.just("m"),
        },
    ),
    st.dictionaries(st.text(max_size=8), anything, max_size=2),
)


@given(body=bodies)
def test_arbitrary_json_is_decoded_or_rejected_with_a_client_error(body: dict[str, Any]) -> None:
    """Drawing a body takes far longer than decoding it, so that all endpoints get each one."""
    check_every_endpoint(msgspec.json.encode(body))


@given(body=st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_rejected_with_a_client_error(body: bytes) -> None:
    check_every_endpoint(body)


def check_every_endpoint(body: bytes) -> None:
    for profile in PROFILES:
        [adapter] = profile.values
        for endpoint in list_generate_endpoints(adapter):
            try:
                check_decoded_or_rejected(adapter, create_client_request(endpoint, body))
            except Exception as error:
                error.add_note(f"{profile.id}: {endpoint.path}")
                raise


def check_decoded_or_rejected(adapter: ClientAdapter, sent: ClientRequest) -> None:
    """Decoding returns a request, or raises a client error that can be encoded."""
    refused = None
    try:
        adapter.read_routing_info(sent)
        request = adapter.decode_request(sent)
        assert isinstance(request, AnyRequest)
        adapter.field_names(sent)
    except errors.GatewayError as error:
        refused = error
    if refused is not None:
        assert refused.origin == "client", refused
        assert adapter.encode_error(refused, sent).status >= 400


# --- errors ---------------------------------------------------------------------------------------

EVERY_ERROR: list[errors.GatewayError] = [
    errors.ClientError("x"),
    errors.MalformedRequest("x", at=3),
    errors.MalformedRequest("x", problem="object"),
    errors.MalformedRequest("x", problem="depth"),
    errors.MalformedRequest("x", problem="encoding", at=0),
    *(
        errors.InvalidParameter("x", param="p", problem=problem, got=value)
        for problem in (
            "missing",
            "type",
            "below",
            "above",
            "value",
            "empty",
            "too_long",
            "conflict",
        )
        for value in (None, 5, 1.5, "s", [1])
    ),
    errors.UnknownParameter("x", param="p"),
    errors.UnsupportedFeature("x", param="p"),
    errors.UnsupportedEndpoint("x", param="model"),
    errors.UnsupportedEncoding("x"),
    errors.ResponseAborted("x"),
    errors.UnknownFinishReason("x"),
    errors.ContextTooLong("x", param="messages", tokens=9, limit=8),
    errors.ContextTooLong("x"),
    errors.ContentFiltered("x"),
    errors.ModelNotFound("x", model="m"),
    errors.VersionNotFound("x", model="m", version="9"),
    errors.PathNotFound("x", method="PUT"),
    errors.RequestNotFound("x", id="i"),
    errors.StoredObjectNotFound("x", id="i"),
    errors.MethodNotAllowed("x", allowed=("POST",)),
    errors.RequestTooLarge("x", limit=8 << 20),
    errors.Unauthorized("x", missing=True),
    errors.Unauthorized("x", missing=False),
    errors.Forbidden("x", model="m"),
    errors.RateLimitExceeded("x", retry_after=0.2),
    errors.RateLimitExceeded("x", scope="tokens"),
    errors.QuotaExceeded("x"),
    errors.ClientDisconnected("x"),
    errors.Overloaded("x", retry_after=1.5),
    errors.RetriesExhausted("x"),
    errors.MemoryExhausted("x"),
    *(errors.DeadlineExceeded("x", which=w) for w in ("queue", "first_token", "idle", "total")),
    errors.WorkerError("x"),
    errors.WorkerUnreachable("x"),
    errors.WorkerFailed("x", status=500),
    errors.WorkerModelNotFound("x", status=404),
    errors.StreamBroken("x"),
    errors.InternalError("x"),
]


def list_subclasses(kind: type[errors.GatewayError]) -> set[type[errors.GatewayError]]:
    return {kind}.union(*(list_subclasses(one) for one in kind.__subclasses__()))


def test_error_list_covers_every_gateway_error() -> None:
    tree = {
        one for one in list_subclasses(errors.GatewayError) if one.__module__ == errors.__name__
    }

    assert tree - {type(error) for error in EVERY_ERROR} == {errors.GatewayError}


@every_adapter
@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda e: type(e).__name__)
def test_every_error_is_encoded_by_every_adapter(
    adapter: ClientAdapter, error: errors.GatewayError
) -> None:
    bodies = (b"", b"{}", b'{"stream":true,"text_input":"x","messages":[]}')
    calls = [
        None,
        *(create_client_request(one, body) for one in adapter.endpoints for body in bodies),
    ]
    for sent in calls:
        reply = adapter.encode_error(error, sent)

        assert reply.status >= 400 or sent is not None
        names = [name.lower() for name, _ in reply.headers]
        assert len(names) == len(set(names))
        for name, value in reply.headers:
            assert f"{name}: {value}".isprintable()
        if isinstance(error, errors.Overloaded):
            retry = {name.lower(): value for name, value in reply.headers}["retry-after"]
            assert int(retry) >= 1


# --- responses ------------------------------------------------------------------------------------

MINIMAL = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "text_input": "hi",
    "inputs": "hi",
    "input": "hi",
}
pieces = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6)


@functools.cache
def list_minimal_requests(
    adapter: ClientAdapter,
) -> Sequence[tuple[ClientRequest, GenerationRequest]]:
    """Return the endpoints that accept the smallest request of their kind, with it."""
    accepted = []
    for endpoint in list_generate_endpoints(adapter):
        for field in ("messages", "prompt", "text_input", "inputs", "input"):
            body = {"model": "m", "max_tokens": 9, field: MINIMAL[field]}
            sent = create_client_request(endpoint, msgspec.json.encode(body))
            try:
                request = adapter.decode_request(sent)
            except errors.ClientError:
                continue
            if isinstance(request, GenerationRequest):
                accepted.append((sent, request))
    return accepted


@every_adapter
def test_every_adapter_decodes_a_minimal_request(adapter: Any) -> None:
    assert list_minimal_requests(adapter)


@every_adapter
@settings(max_examples=100)  # each example uses every endpoint, unary and streaming
@given(texts=pieces, cuts=st.integers(1, 6))
def test_unary_and_streaming_responses_contain_the_complete_text(
    adapter: Any, texts: list[str], cuts: int
) -> None:
    events: list[Event] = [
        *map(TextDelta, texts),
        ChoiceEnd("eos"),
        Usage(1, len(texts)),
        StreamEnd(),
    ]
    response, whole = aggregate(events), "".join(texts)
    for sent, request in list_minimal_requests(adapter):
        encoder = adapter.create_encoder(sent, request, ABOUT)
        reply = encoder.encode_unary(response)
        assert reply.status == 200
        assert whole in extract_text(reply.body)

        streamed = adapter.create_encoder(sent, request, ABOUT)
        batches = [events[i : i + cuts] for i in range(0, len(events), cuts)]
        wire = b"".join(streamed.encode_events(batch) for batch in batches)
        assert whole in extract_text(wire)


def extract_text(wire: bytes) -> str:
    """Return the text of a response, unary or streamed."""
    return "".join(
        extract_strings([msgspec.json.decode(one) for one in split_json_documents(wire)])
    )


def split_json_documents(wire: bytes) -> Iterator[bytes]:
    """Return the JSON documents of a stream in any framing."""
    for line in wire.replace(b"\0", b"\n").split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if data.startswith((b"{", b"[{")):
            yield data


def extract_strings(value: Any) -> Iterator[str]:
    """Return the strings under keys that hold text, in order."""
    match value:
        case dict():
            for key, inner in value.items():
                if key in {"content", "text", "text_output", "generated_text", "response", "data"}:
                    yield from extract_texts(inner)
                elif key != "details":
                    yield from extract_strings(inner)
        case list():
            for inner in value:
                yield from extract_strings(inner)
        case _:
            pass


def extract_texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() if all(isinstance(one, str) for one in value):
            yield from value
        case _:
            yield from extract_strings(value)


@every_adapter
def test_body_is_nested_as_deep_as_the_limit_and_no_deeper(adapter: ClientAdapter) -> None:
    """The same depth is refused at every endpoint, by the error of the server if it has one."""
    azure_path, mindie_text = "PathNotFound", "InvalidParameter"
    for endpoint in list_generate_endpoints(adapter):
        problems = []
        for depth in (MAX_DEPTH, MAX_DEPTH + 1):
            body = b'{"model":"m","x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
            problems.append(find_problem(adapter, create_client_request(endpoint, body)))
        assert problems[0] != "depth", endpoint.path
        assert problems[1] in {"depth", azure_path, mindie_text}, endpoint.path


def find_problem(adapter: ClientAdapter, sent: ClientRequest) -> str:
    """Return the problem of a body that can't be decoded, or the class of its error."""
    try:
        adapter.read_routing_info(sent)
        adapter.decode_request(sent)
    except errors.MalformedRequest as error:
        return error.problem
    except errors.GatewayError as error:
        return type(error).__name__
    return "none"
