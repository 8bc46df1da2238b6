"""Requests and responses that are passed through unchanged."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.core.errors import (
    ContextTooLong,
    GatewayError,
    MalformedRequest,
    Overloaded,
    StreamBroken,
    UnsupportedFeature,
    UpstreamErrorText,
    WorkerFailed,
    WorkerModelNotFound,
)
from protocols.core.events import ChoiceEnd, Event, StreamEnd, StreamStart, TextDelta, Usage
from protocols.core.interfaces import (
    ClientRequest,
    Endpoint,
    PassthroughReader,
    PassthroughRequest,
    ResponseContext,
)
from protocols.core.request import GenerationRequest
from protocols.core.sse import MAX_EVENT_BYTES
from protocols.openai.endpoints import OpenAI
from protocols.triton.endpoints import Triton
from tests.unit.protocols.triton.conftest import build_response_context

VLLM = Triton("vllm")
HI = b'{"text_input":"hi","max_tokens":2}'


def create_client_request(variant: str, body: bytes, **headers: str) -> ClientRequest:
    path = f"/v2/models/chat/{variant}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ClientRequest(
        Endpoint("POST", path, operation=variant), {"model": "chat"}, named, "", body, path
    )


def create_response_context(shown: str = "chat", served: str = "llama") -> ResponseContext:
    base = build_response_context(shown)
    return ResponseContext(base.id, base.created, shown, "1", served, base.clock)


def require_passthrough(
    variant: str, body: bytes = HI, *, shown: str = "chat", served: str = "llama"
) -> PassthroughRequest:
    relay = VLLM.prepare_passthrough(
        Triton("vllm"), create_client_request(variant, body), create_response_context(shown, served)
    )
    assert relay is not None
    return relay


def read_generation_request(variant: str, body: bytes) -> GenerationRequest:
    request = require_passthrough(variant, body).request
    assert isinstance(request, GenerationRequest)
    return request


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    "body",
    [
        HI,
        b"",
        b"{",
        b"[" * 9000,
        b'{"text_input":"a\xff"}',
        b'{"text_input":5,"text_input":"b"}',
        b'{"PROMPT":["a"],"STREAM":true,"odd":{"x":1.50}}',
        b'{"text_input":"a","parameters":1}',
        b'{"text_input":"a","stop":true}',
    ],
)
def test_any_body_is_passed_through_unchanged(variant: str, body: bytes) -> None:
    relay = require_passthrough(variant, body)
    assert relay.upstream_request.body == body
    assert relay.upstream_request.path == f"/v2/models/llama/{variant}"
    assert read_generation_request(variant, body).stream is (variant == "generate_stream")
    assert read_generation_request(variant, body).model == "llama"


@pytest.mark.parametrize(
    ("served", "path"),
    [
        ("llama/versions/2", "/v2/models/llama/versions/2"),
        ("a b/../c?#", "/v2/models/a%20b%2F..%2Fc%3F%23"),
    ],
)
def test_passthrough_path_uses_the_escaped_worker_model_name(served: str, path: str) -> None:
    assert (
        require_passthrough("generate", served=served).upstream_request.path == f"{path}/generate"
    )


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (VLLM, Triton("trtllm")),
        (VLLM, Triton("vllm", prompts="chat")),
        (VLLM, OpenAI()),
        (Triton("vllm", fields={"text_input": "PROMPT"}), Triton("vllm")),
    ],
    ids=["another profile", "prompts that are chats", "another protocol", "other names"],
)
def test_client_with_other_profile_or_options_is_translated(worker: Triton, client: Any) -> None:
    assert (
        worker.prepare_passthrough(
            client, create_client_request("generate", HI), create_response_context()
        )
        is None
    )


def test_infer_and_compressed_requests_are_translated() -> None:
    assert (
        VLLM.prepare_passthrough(
            Triton("vllm"), create_client_request("infer", HI), create_response_context()
        )
        is None
    )

    packed = create_client_request("generate", HI, content_encoding="gzip")
    assert VLLM.prepare_passthrough(Triton("vllm"), packed, create_response_context()) is None


@pytest.mark.parametrize(
    "body", [b'{"text_input":"a","stop":true}', b'{"parameters":{"st\\u006fp":true}}']
)
def test_llmapi_request_with_stop_flag_is_not_passed_through(body: bytes) -> None:
    worker = Triton("llmapi")
    assert (
        worker.prepare_passthrough(
            Triton("llmapi"), create_client_request("generate", body), create_response_context()
        )
        is None
    )
    for other in (HI, b'{"text_input":"a","parameters":1}'):
        assert (
            worker.prepare_passthrough(
                Triton("llmapi"),
                create_client_request("generate", other),
                create_response_context(),
            )
            is not None
        )


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        (HI, ("hi",)),
        (b'{"a":"x","text_input":[["hi"],["ho"]]}', ("hi", "ho")),
        (b'{"id":"7","STREAM":true,"PROMPT":["hi"],"more":"x"}', ("hi",)),
        (b'{"text_input":5,"parameters":{"a":"x"}}', ()),
        (b"{", ()),
    ],
)
def test_prompt_of_passthrough_request_is_read_for_load_balancing(
    body: bytes, prompts: tuple[str, ...]
) -> None:
    assert read_generation_request("generate", body).prompts == prompts


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("generate", "application/json"),
        ("generate_stream", "text/event-stream; charset=utf-8"),
    ],
)
def test_passthrough_content_type_equals_triton(variant: str, kind: str) -> None:
    assert dict(require_passthrough(variant).build_headers())["Content-Type"] == kind


# --- unary responses ------------------------------------------------------------------------------

ANSWER = b'{"model_name":"llama","model_version":"1","odd":[1.50],"text_output":"hi all\\u00e9"}'


def read_passthrough(
    passage: PassthroughReader, *pieces: bytes
) -> tuple[list[bytes | None], list[Event]]:
    out, events = [], list[Event]()
    for piece in pieces:
        data, next_events = passage.feed([piece])
        out.append(data)
        events += next_events
    data, next_events = passage.close()
    return [*out, data], [*events, *next_events]


def join_output(out: Sequence[bytes | None]) -> bytes:
    assert None not in out
    return b"".join(data for data in out if data is not None)


def test_unary_response_shows_the_client_model_name() -> None:
    out, events = read_passthrough(
        require_passthrough("generate").create_reader(), ANSWER[:20], ANSWER[20:]
    )
    assert out == [b"", b"", ANSWER.replace(b"llama", b"chat")]
    assert events == [TextDelta("hi all\u00e9", tokens=2), ChoiceEnd("unknown"), StreamEnd()]


def test_only_the_model_name_value_is_replaced() -> None:
    body = b'{"model_name": "llama","text_output":"\\"model_name\\":\\"llama\\" \\"llama\\""}'
    assert read_passthrough(require_passthrough("generate").create_reader(), body)[0][
        -1
    ] == body.replace(b'"model_name": "llama"', b'"model_name": "chat"')

    versioned = require_passthrough("generate", served="llama/versions/2")
    assert read_passthrough(versioned.create_reader(), ANSWER)[0][-1] == ANSWER.replace(
        b"llama", b"chat"
    )

    same = require_passthrough("generate", shown="llama")
    assert read_passthrough(same.create_reader(), ANSWER)[0][-1] == ANSWER


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ((b'{"text_output":["a","b"],"finish_reason":["length"],"num_input_tokens":3,'
         b'"num_output_tokens":[1,1]}'),
         [StreamStart(3), TextDelta("ab", tokens=2), ChoiceEnd("length"), Usage(3, 2),
          StreamEnd()]),
        (b'{"text_output":"a","num_output_tokens":4}',
         [TextDelta("a", tokens=4), ChoiceEnd("unknown"),
         StreamEnd()]),
        (b'{"text_output":"a","finish_reason":"None"}',
         [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]),
        (b'{"text_output":"a","finish_reason":7}',
         [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]),
        (b'{"id":"i","model_name":"m","TEXT":"abcde","logprobs":"x","N":[1,null]}',
         [TextDelta("abcde1", tokens=2), ChoiceEnd("unknown"), StreamEnd()]),
        (b'{"TEXT":[]}', [ChoiceEnd("unknown"), StreamEnd()]),
        (b'{"TEXT":"\xff","X":NaN}',
         [TextDelta("\ufffdnan", tokens=1), ChoiceEnd("unknown"), StreamEnd()]),
    ],
)  # fmt: skip
def test_usage_and_finish_reason_of_a_response_are_recorded(
    body: bytes, events: list[Event]
) -> None:
    out, passthrough = read_passthrough(require_passthrough("generate").create_reader(), body)
    assert out[-1] == body
    assert passthrough == events


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (b'{"text_output":"a","num_input_tokens":-1,"finish_reason":"cancelled"}',
         b'{"text_output":"a","finish_reason":"cancelled"}'),
        (b'{"num_input_tokens" : "2","text_output":"a"}', b'{"text_output":"a"}'),
        (b'{"text_output":"abcde","num_output_tokens": 1000000000000000000}',
         b'{"text_output":"abcde","num_output_tokens": 2}'),
        (b'{"text_output":"a","num_output_tokens":[2.5],"num_input_tokens":[3]}',
         b'{"text_output":"a","num_output_tokens":[1]}'),
        (b'{"num_output_tokens":{"tokens":2},"text_output":"\\"num_output_tokens\\":9"}',
         b'{"num_output_tokens":6,"text_output":"\\"num_output_tokens\\":9"}'),
    ],
)  # fmt: skip
def test_implausible_token_counts_of_a_response_do_not_reach_the_client(
    worker: bytes, client: bytes
) -> None:
    out, events = read_passthrough(require_passthrough("generate").create_reader(), worker)
    assert out[-1] == client

    word = "cancelled" if b"cancelled" in worker else None
    end = ChoiceEnd("unknown", own_word=word)
    assert events[-2:] == [end, StreamEnd(has_ignored_usage=True)]


def test_megabyte_response_is_passed_through_and_validated() -> None:
    long = b'{"TEXT":"%b"}' % (b"x" * (1 << 20))
    assert read_passthrough(require_passthrough("generate").create_reader(), long)[0][-1] == long
    with pytest.raises(WorkerFailed):
        read_passthrough(require_passthrough("generate").create_reader(), long[:-1])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", StreamBroken),
        (b" \n", StreamBroken),
        (ANSWER[:60], WorkerFailed),
        (b"[]", WorkerFailed),
        (b"data: " + ANSWER + b"\n\n", WorkerFailed),
        (b'{"error":7}', WorkerFailed),
    ],
)
def test_malformed_passthrough_response_raises_its_error(
    body: bytes, error: type[GatewayError]
) -> None:
    with pytest.raises(GatewayError) as excinfo:
        read_passthrough(require_passthrough("generate").create_reader(), body)
    assert type(excinfo.value) is error
    assert excinfo.value.upstream_error is None


def test_error_with_status_200_keeps_its_status_and_text() -> None:
    text = "generate expects model to produce exactly 1 response, use generate stream"
    with pytest.raises(UnsupportedFeature) as excinfo:
        read_passthrough(
            require_passthrough("generate").create_reader(), json.dumps({"error": text}).encode()
        )
    assert excinfo.value.upstream_error == UpstreamErrorText(200, text)


# --- streams --------------------------------------------------------------------------------------


def format_stream_event(**value: Any) -> bytes:
    fields = {"model_name": "llama", "model_version": "1"} | value
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


STREAM = (
    format_stream_event(text_output="Hel"),
    format_stream_event(text_output=""),
    format_stream_event(TEXT=["l", "o"]),
)


@given(cuts=st.lists(st.integers(0, len(b"".join(STREAM))), max_size=8))
def test_stream_is_passed_through_in_any_packet_size(cuts: list[int]) -> None:
    data, edges = b"".join(STREAM), [0, *sorted(cuts), len(b"".join(STREAM))]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    out, events = read_passthrough(require_passthrough("generate_stream").create_reader(), *pieces)

    assert join_output(out) == data.replace(b"llama", b"chat")
    assert events == [TextDelta("Hel"), TextDelta("lo"), ChoiceEnd("unknown"), StreamEnd()]


def test_only_complete_events_are_passed_through() -> None:
    passage = require_passthrough("generate_stream").create_reader()
    assert passage.feed([STREAM[0][:-1]]) == (b"", ())

    data, events = passage.feed([b"\ndata: {"])
    assert data == STREAM[0].replace(b"llama", b"chat")
    assert events == [TextDelta("Hel")]


def test_crlf_line_ends_and_comments_are_removed() -> None:
    data = b": soon\r\n\r\nid: 7\r\n" + b"".join(STREAM).replace(b"\n", b"\r\n")
    for pieces in ([data], [bytes([one]) for one in data]):
        out, _ = read_passthrough(require_passthrough("generate_stream").create_reader(), *pieces)
        assert join_output(out) == b"".join(STREAM).replace(b"llama", b"chat")


def test_model_name_with_blanks_or_escapes_is_replaced() -> None:
    for spelling in (b'"model_name" : "llama"', b'"model_name":"ll\\u0061ma"'):
        [*_, body] = read_passthrough(
            require_passthrough("generate").create_reader(),
            ANSWER.replace(b'"model_name":"llama"', spelling),
        )[0]
        assert body is not None
        assert json.loads(body)["model_name"] == "chat"
    other = ANSWER.replace(b'"llama"', b'"ensemble"')
    assert read_passthrough(require_passthrough("generate").create_reader(), other)[0][-1] == other

    odd = ANSWER.replace(b'"llama"', b'"ll\xffma"')
    assert read_passthrough(require_passthrough("generate").create_reader(), odd)[0][-1] == odd


def test_stream_without_events_is_complete() -> None:
    assert read_passthrough(require_passthrough("generate_stream").create_reader()) == (
        [b""],
        [ChoiceEnd("unknown"), StreamEnd()],
    )


def test_implausible_token_counts_of_a_stream_do_not_reach_the_client() -> None:
    sent = [
        format_stream_event(text_output="a", num_input_tokens=2, num_output_tokens=1),
        format_stream_event(text_output="b", num_input_tokens=2, num_output_tokens=2**62),
        format_stream_event(text_output="c", num_output_tokens=[-1]),
        format_stream_event(text_output="d", num_output_tokens=True),
    ]
    reader = require_passthrough("generate_stream", shown="llama").create_reader()

    out, events = read_passthrough(reader, *sent)

    assert join_output(out) == b"".join(
        [
            sent[0],
            format_stream_event(text_output="b", num_output_tokens=1),
            format_stream_event(text_output="c", num_output_tokens=[1]),
            format_stream_event(text_output="d", num_output_tokens=1),
        ]
    )
    assert events[-1] == StreamEnd(has_ignored_usage=True)
    assert not [event for event in events if isinstance(event, Usage)]


def test_usage_and_finish_reason_of_a_stream_are_recorded() -> None:
    first = format_stream_event(
        text_output="a", finish_reason="None", num_input_tokens=2, num_output_tokens=1
    )
    last = format_stream_event(
        text_output="b", finish_reason="stop", num_input_tokens=2, num_output_tokens=1
    )

    _, events = read_passthrough(
        require_passthrough("generate_stream").create_reader(), first, last
    )

    assert events == [
        StreamStart(2),
        TextDelta("a"),
        TextDelta("b"),
        ChoiceEnd("eos"),
        Usage(2, 2),
        StreamEnd(),
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        (STREAM[0] + STREAM[1][:30],),
        (STREAM[0], b"data: {\n"),
        (format_stream_event(text_output="a", finish_reason="None"),),
        (STREAM[0], b"{"),
    ],
    ids=["inside an event", "inside an event's line", "before the reason", "in no event"],
)
def test_truncated_stream_raises_stream_broken(pieces: Sequence[bytes]) -> None:
    with pytest.raises(StreamBroken):
        read_passthrough(require_passthrough("generate_stream").create_reader(), *pieces)


BROKEN = b'data: {"error":"cuda\\u0000of \'llama_0_3\' is gone"}\n\n'
ERROR_TEXT = UpstreamErrorText(400, "cuda of 'chat_0_3' is gone", in_stream=True)


def test_error_event_is_raised_with_its_text_and_stream_flag() -> None:
    with pytest.raises(WorkerFailed) as excinfo:
        require_passthrough("generate_stream").create_reader().feed([BROKEN])
    assert excinfo.value.upstream_error == ERROR_TEXT

    for ending in ("feed", "close"):
        passage = require_passthrough("generate_stream").create_reader()
        data, events = passage.feed([STREAM[0] + BROKEN + STREAM[1]])
        assert data == STREAM[0].replace(b"llama", b"chat")
        assert events == [TextDelta("Hel")]
        with pytest.raises(WorkerFailed) as excinfo:
            passage.feed([STREAM[1]]) if ending == "feed" else passage.close()
        assert excinfo.value.upstream_error == ERROR_TEXT


def test_error_event_is_encoded_even_for_a_malformed_request_body() -> None:
    error = WorkerFailed("the worker answered with an error")
    error.upstream_error = ERROR_TEXT

    make = require_passthrough("generate_stream", b"{").create_encoder

    assert make is not None
    assert make().encode_error_event(error) == b'data: {"error":"cuda of \'chat_0_3\' is gone"}\n\n'


@pytest.mark.parametrize(
    ("data", "text"),
    [(b'{"error":"boom"}\n\n', "boom"), (ANSWER + b"\n\n", None), (b"<html>\n\n", None)],
)
def test_data_that_is_no_event_raises_worker_failed(data: bytes, text: str | None) -> None:
    with pytest.raises(WorkerFailed) as excinfo:
        require_passthrough("generate_stream").create_reader().feed([data])
    assert (excinfo.value.upstream_error and excinfo.value.upstream_error.text) == text


def test_unterminated_event_over_the_limit_raises_worker_failed() -> None:
    passage = require_passthrough("generate_stream").create_reader()
    passage.feed([b"data: " + b"x" * (MAX_EVENT_BYTES - 6)])
    with pytest.raises(WorkerFailed):
        passage.feed([b"x"])


# --- errors ---------------------------------------------------------------------------------------


def read_worker_error(status: int, text: str, **headers: str) -> GatewayError:
    error_reader = require_passthrough("generate").read_error
    assert error_reader is not None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return error_reader(status, named, json.dumps({"error": text}).encode())


@pytest.mark.parametrize(
    ("status", "text", "meaning"),
    [
        (
            400,
            "[request id: 7] expected 1 inputs but got 0 inputs for model 'chat'",
            UnsupportedFeature,
        ),
        (400, "input 'PROMPT' already exists in request", UnsupportedFeature),
        (400, "parameter 'x' has invalid type. It should be either 'int'", UnsupportedFeature),
        (400, "Converting keyword: 'parameters': no", UnsupportedFeature),
        (400, "engine exploded", WorkerFailed),
        (400, "[request id: 7] Exceeds maximum queue size", Overloaded),
        (400, "Prompt length (9) exceeds maximum input length (8).", ContextTooLong),
        (404, "Request for unknown model: 'chat' is not found", WorkerModelNotFound),
        (500, "failed to parse the request JSON buffer: Invalid value. at 0", MalformedRequest),
        (
            500,
            "Unable to parse 'id': attempt to access JSON non-string as string",
            MalformedRequest,
        ),
        (500, "attempt to get members for non-object", MalformedRequest),
        (500, "[request id: 7] the device is gone", WorkerFailed),
        (501, "not built in", WorkerFailed),
        (503, "the server is exiting", Overloaded),
    ],
)
def test_worker_error_keeps_its_text_and_maps_to_an_error_type(
    status: int, text: str, meaning: type[GatewayError]
) -> None:
    error = read_worker_error(status, text)
    assert type(error) is meaning
    assert error.upstream_error == UpstreamErrorText(status, text)


def test_worker_error_text_is_sanitized_and_names_the_client_model() -> None:
    error = read_worker_error(400, "'llama' and 'llama_0_1', \x1b not 'llamas':\n" + "x" * 1000)
    assert error.upstream_error is not None
    assert error.upstream_error.text.startswith("'chat' and 'chat_0_1',   not 'llamas': xxx")
    assert len(error.upstream_error.text) <= 300


@pytest.mark.parametrize("status", [401, 403, 429])
def test_authentication_and_rate_limit_errors_of_workers_are_hidden(status: int) -> None:
    assert read_worker_error(status, "your key is wrong").upstream_error is None


def test_worker_errors_that_are_not_json_are_hidden() -> None:
    error_reader = require_passthrough("generate").read_error
    assert error_reader is not None
    assert error_reader(500, {}, b"<html>secret</html>").upstream_error is None
    assert error_reader(503, {"retry-after": "7"}, b"").retry_after == 7


@pytest.mark.parametrize("rest", [b"", STREAM[0]], ids=["alone", "with what follows"])
def test_sse_framed_error_body_is_read(rest: bytes) -> None:
    error_reader = require_passthrough("generate_stream").read_error
    assert error_reader is not None
    assert error_reader(400, {}, BROKEN + rest).upstream_error == ERROR_TEXT


# --- what the client receives ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "error_text", "strict", "sane"),
    [
        (MalformedRequest("-"), UpstreamErrorText(500, "no JSON"), 500, 400),
        (UnsupportedFeature("-"), UpstreamErrorText(200, "one response"), 200, 400),
        (WorkerFailed("-"), UpstreamErrorText(404, "no model"), 404, 400),
        (WorkerFailed("-"), UpstreamErrorText(400, "boom", in_stream=True), 400, 400),
        (WorkerFailed("-"), UpstreamErrorText(400, "boom"), 400, 400),
        (Overloaded("-"), UpstreamErrorText(503, "later"), 503, 503),
    ],
)
def test_upstream_error_text_is_encoded_for_strict_and_sane(
    error: GatewayError, error_text: UpstreamErrorText, strict: int, sane: int
) -> None:
    error.upstream_error = error_text
    request = create_client_request("generate_stream", b"{")
    kind = "text/event-stream; charset=utf-8" if error_text.in_stream else "application/json"
    body = b'{"error":"%b"}' % error_text.text.encode()

    reply = VLLM.encode_error(error, request)
    assert (reply.status, dict(reply.headers)["Content-Type"]) == (strict, kind)
    assert reply.body == (b"data: %b\n\n" % body if error_text.in_stream else body)

    reply = Triton("vllm", status="sane").encode_error(error, request)
    assert (reply.status, reply.body) == (sane, body)
    assert dict(reply.headers)["Content-Type"] == "application/json"


def test_a_model_that_only_streams_has_its_stream_collected() -> None:
    worker = Triton("vllm")
    refusal = b'{"error":"generate expects model to produce exactly 1 response"}'
    assert worker.learn_from_error("llama", worker.read_error(400, {}, refusal))
    prepared = worker.prepare_passthrough(
        Triton("vllm"),
        create_client_request("generate", HI),
        create_response_context("chat", "llama"),
    )
    assert prepared is not None

    out, _ = read_passthrough(prepared.create_reader(), *STREAM)

    assert prepared.upstream_request.path.endswith("/generate_stream")
    assert b'"text_output":"Hel"' in join_output(out)
