"""Calls that are passed on as they are, and their answers."""

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
from protocols.openai.endpoints import OpenAI
from protocols.triton.endpoints import Triton
from tests.unit.protocols.triton.conftest import about

VLLM = Triton("vllm")
HI = b'{"text_input":"hi","max_tokens":2}'


def call(variant: str, body: bytes, **headers: str) -> ClientRequest:
    path = f"/v2/models/chat/{variant}"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ClientRequest(
        Endpoint("POST", path, operation=variant), {"model": "chat"}, named, "", body, path
    )


def told(shown: str = "chat", served: str = "llama") -> ResponseContext:
    whole = about(shown)
    return ResponseContext(whole.id, whole.created, shown, "1", served, whole.clock)


def taken(
    variant: str, body: bytes = HI, *, shown: str = "chat", served: str = "llama"
) -> PassthroughRequest:
    relay = VLLM.prepare_passthrough(Triton("vllm"), call(variant, body), told(shown, served))
    assert relay is not None
    return relay


def request(variant: str, body: bytes) -> GenerationRequest:
    found = taken(variant, body).request
    assert isinstance(found, GenerationRequest)
    return found


# --- the way there --------------------------------------------------------------------------------


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
def test_any_body_is_passed_on_untouched(variant: str, body: bytes) -> None:
    relay = taken(variant, body)
    assert relay.upstream_request.body == body
    assert relay.upstream_request.path == f"/v2/models/llama/{variant}"
    assert request(variant, body).stream is (variant == "generate_stream")
    assert request(variant, body).model == "llama"


@pytest.mark.parametrize(
    ("served", "path"),
    [
        ("llama/versions/2", "/v2/models/llama/versions/2"),
        ("a b/../c?#", "/v2/models/a%20b%2F..%2Fc%3F%23"),
    ],
)
def test_the_model_s_path_is_the_worker_s(served: str, path: str) -> None:
    assert taken("generate", served=served).upstream_request.path == f"{path}/generate"


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (VLLM, Triton("trtllm")),
        (VLLM, Triton("vllm", prompts="chat")),
        (VLLM, OpenAI()),
        (Triton("vllm", fields={"text_input": "PROMPT"}), Triton("vllm")),
    ],
    ids=["another profile", "prompts that are chats", "another dialect", "other names"],
)
def test_what_the_gateway_has_to_do_with_goes_the_long_way(worker: Triton, client: Any) -> None:
    assert worker.prepare_passthrough(client, call("generate", HI), told()) is None


def test_infer_and_what_is_packed_go_the_long_way() -> None:
    assert VLLM.prepare_passthrough(Triton("vllm"), call("infer", HI), told()) is None
    packed = call("generate", HI, content_encoding="gzip")
    assert VLLM.prepare_passthrough(Triton("vllm"), packed, told()) is None


@pytest.mark.parametrize(
    "body", [b'{"text_input":"a","stop":true}', b'{"parameters":{"st\\u006fp":true}}']
)
def test_no_client_ends_another_one_s_request(body: bytes) -> None:
    worker = Triton("llmapi")
    assert worker.prepare_passthrough(Triton("llmapi"), call("generate", body), told()) is None
    for other in (HI, b'{"text_input":"a","parameters":1}'):
        assert (
            worker.prepare_passthrough(Triton("llmapi"), call("generate", other), told())
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
def test_the_prompt_is_read_for_choosing_a_worker(body: bytes, prompts: tuple[str, ...]) -> None:
    assert request("generate", body).prompts == prompts


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("generate", "application/json"),
        ("generate_stream", "text/event-stream; charset=utf-8"),
    ],
)
def test_the_headers_are_those_of_the_original(variant: str, kind: str) -> None:
    assert dict(taken(variant).build_headers())["Content-Type"] == kind


# --- the way back: whole --------------------------------------------------------------------------

ANSWER = b'{"model_name":"llama","model_version":"1","odd":[1.50],"text_output":"hi all\\u00e9"}'


def read(passage: PassthroughReader, *pieces: bytes) -> tuple[list[bytes | None], list[Event]]:
    out, events = [], list[Event]()
    for piece in pieces:
        data, more = passage.feed([piece])
        out.append(data)
        events += more
    data, more = passage.close()
    return [*out, data], [*events, *more]


def joined(out: Sequence[bytes | None]) -> bytes:
    assert None not in out
    return b"".join(data for data in out if data is not None)


def test_a_whole_answer_comes_back_unread_under_the_client_s_name() -> None:
    out, events = read(taken("generate").create_reader(), ANSWER[:20], ANSWER[20:])
    assert out == [b"", b"", ANSWER.replace(b"llama", b"chat")]
    assert events == [TextDelta("hi all\u00e9", tokens=2), ChoiceEnd("unknown"), StreamEnd()]


def test_only_the_name_is_replaced() -> None:
    body = b'{"model_name": "llama","text_output":"\\"model_name\\":\\"llama\\" \\"llama\\""}'
    assert read(taken("generate").create_reader(), body)[0][-1] == body.replace(
        b'"model_name": "llama"', b'"model_name": "chat"'
    )
    versioned = taken("generate", served="llama/versions/2")
    assert read(versioned.create_reader(), ANSWER)[0][-1] == ANSWER.replace(b"llama", b"chat")
    same = taken("generate", shown="llama")
    assert read(same.create_reader(), ANSWER)[0][-1] == ANSWER


@pytest.mark.parametrize(
    ("told", "events"),
    [
        ((b'{"text_output":["a","b"],"finish_reason":["length"],"num_input_tokens":3,'
         b'"num_output_tokens":[1,1]}'),
         [StreamStart(3), TextDelta("ab", tokens=2), ChoiceEnd("length"), Usage(3, 2),
          StreamEnd()]),
        (b'{"text_output":"a","num_output_tokens":4}',
         [TextDelta("a", tokens=4), ChoiceEnd("unknown"),
         StreamEnd()]),
        (b'{"text_output":"a","num_input_tokens":-1,"finish_reason":"cancelled"}',
         [TextDelta("a"), ChoiceEnd("unknown"), StreamEnd()]),
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
def test_what_an_answer_tells_is_recorded(told: bytes, events: list[Event]) -> None:
    out, found = read(taken("generate").create_reader(), told)
    assert out[-1] == told
    assert found == events


def test_a_long_answer_is_read_fast() -> None:
    long = b'{"TEXT":"%b"}' % (b"x" * (1 << 20))
    assert read(taken("generate").create_reader(), long)[0][-1] == long
    with pytest.raises(WorkerFailed):
        read(taken("generate").create_reader(), long[:-1])


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
def test_what_is_no_answer_is_an_error(body: bytes, error: type[GatewayError]) -> None:
    with pytest.raises(GatewayError) as caught:
        read(taken("generate").create_reader(), body)
    assert type(caught.value) is error
    assert caught.value.upstream_error is None


def test_a_complaint_under_status_200_is_told_as_it_is() -> None:
    text = "generate expects model to produce exactly 1 response, use generate stream"
    with pytest.raises(UnsupportedFeature) as caught:
        read(taken("generate").create_reader(), json.dumps({"error": text}).encode())
    assert caught.value.upstream_error == UpstreamErrorText(200, text)


# --- the way back: a stream -----------------------------------------------------------------------


def event(**told: Any) -> bytes:
    fields = {"model_name": "llama", "model_version": "1"} | told
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


STREAM = (event(text_output="Hel"), event(text_output=""), event(TEXT=["l", "o"]))


@given(cuts=st.lists(st.integers(0, len(b"".join(STREAM))), max_size=8))
def test_a_stream_comes_back_whatever_the_packets(cuts: list[int]) -> None:
    data, edges = b"".join(STREAM), [0, *sorted(cuts), len(b"".join(STREAM))]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]

    out, events = read(taken("generate_stream").create_reader(), *pieces)

    assert joined(out) == data.replace(b"llama", b"chat")
    assert events == [TextDelta("Hel"), TextDelta("lo"), ChoiceEnd("unknown"), StreamEnd()]


def test_only_whole_events_are_passed_on() -> None:
    passage = taken("generate_stream").create_reader()
    assert passage.feed([STREAM[0][:-1]]) == (b"", ())
    data, events = passage.feed([b"\ndata: {"])
    assert data == STREAM[0].replace(b"llama", b"chat")
    assert events == [TextDelta("Hel")]


def test_other_line_ends_and_comments_are_not_shown() -> None:
    data = b": soon\r\n\r\nid: 7\r\n" + b"".join(STREAM).replace(b"\n", b"\r\n")
    for pieces in ([data], [bytes([one]) for one in data]):
        out, _ = read(taken("generate_stream").create_reader(), *pieces)
        assert joined(out) == b"".join(STREAM).replace(b"llama", b"chat")


def test_a_name_is_replaced_however_it_is_spelt() -> None:
    for spelling in (b'"model_name" : "llama"', b'"model_name":"ll\\u0061ma"'):
        [*_, body] = read(
            taken("generate").create_reader(), ANSWER.replace(b'"model_name":"llama"', spelling)
        )[0]
        assert body is not None
        assert json.loads(body)["model_name"] == "chat"
    other = ANSWER.replace(b'"llama"', b'"ensemble"')
    assert read(taken("generate").create_reader(), other)[0][-1] == other
    odd = ANSWER.replace(b'"llama"', b'"ll\xffma"')
    assert read(taken("generate").create_reader(), odd)[0][-1] == odd


def test_a_stream_without_events_is_an_answer() -> None:
    assert read(taken("generate_stream").create_reader()) == (
        [b""],
        [ChoiceEnd("unknown"), StreamEnd()],
    )


def test_figures_and_reasons_of_a_stream_are_recorded() -> None:
    first = event(text_output="a", finish_reason="None", num_input_tokens=2, num_output_tokens=1)
    last = event(text_output="b", finish_reason="stop", num_input_tokens=2, num_output_tokens=1)
    _, events = read(taken("generate_stream").create_reader(), first, last)
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
        (STREAM[0], b"data: {}\n"),
        (event(text_output="a", finish_reason="None"),),
        (STREAM[0], b"{"),
    ],
    ids=["inside an event", "before an event's last newline", "before the reason", "in no event"],
)
def test_a_stream_that_is_cut_is_told(pieces: Sequence[bytes]) -> None:
    with pytest.raises(StreamBroken):
        read(taken("generate_stream").create_reader(), *pieces)


BROKEN = b'data: {"error":"cuda\\u0000of \'llama_0_3\' is gone"}\n\n'
TOLD = UpstreamErrorText(400, "cuda of 'chat_0_3' is gone", in_stream=True)


def test_an_event_of_an_error_is_told_in_its_shape() -> None:
    with pytest.raises(WorkerFailed) as caught:
        taken("generate_stream").create_reader().feed([BROKEN])
    assert caught.value.upstream_error == TOLD
    for ending in ("feed", "close"):
        passage = taken("generate_stream").create_reader()
        data, events = passage.feed([STREAM[0] + BROKEN + STREAM[1]])
        assert data == STREAM[0].replace(b"llama", b"chat")
        assert events == [TextDelta("Hel")]
        with pytest.raises(WorkerFailed) as caught:
            passage.feed([STREAM[1]]) if ending == "feed" else passage.close()
        assert caught.value.upstream_error == TOLD


def test_an_error_is_written_into_a_stream_whatever_the_body_was() -> None:
    error = WorkerFailed("the worker answered with an error")
    error.upstream_error = TOLD
    make = taken("generate_stream", b"{").create_encoder
    assert make is not None
    assert make().encode_error_event(error) == b'data: {"error":"cuda of \'chat_0_3\' is gone"}\n\n'


@pytest.mark.parametrize(
    ("data", "text"),
    [(b'{"error":"boom"}\n\n', "boom"), (ANSWER + b"\n\n", None), (b"<html>\n\n", None)],
)
def test_what_is_no_event_is_not_passed_on(data: bytes, text: str | None) -> None:
    with pytest.raises(WorkerFailed) as caught:
        taken("generate_stream").create_reader().feed([data])
    assert (caught.value.upstream_error and caught.value.upstream_error.text) == text


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    passage = taken("generate_stream").create_reader()
    passage.feed([b"data: " + b"x" * ((1 << 24) - 6)])
    with pytest.raises(WorkerFailed):
        passage.feed([b"x"])


# --- what is no answer ----------------------------------------------------------------------------


def refused(status: int, text: str, **headers: str) -> GatewayError:
    found = taken("generate").read_error
    assert found is not None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return found(status, named, json.dumps({"error": text}).encode())


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
        (404, "Request for unknown model: 'chat' is not found", WorkerFailed),
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
def test_an_error_is_told_as_it_is_and_blamed_on_whose_it_is(
    status: int, text: str, meaning: type[GatewayError]
) -> None:
    found = refused(status, text)
    assert type(found) is meaning
    assert found.upstream_error == UpstreamErrorText(status, text)


def test_an_error_s_text_is_short_and_clean_and_names_the_model_that_was_asked() -> None:
    found = refused(400, "'llama' and 'llama_0_1', \x1b not 'llamas':\n" + "x" * 1000)
    assert found.upstream_error is not None
    assert found.upstream_error.text.startswith("'chat' and 'chat_0_1',   not 'llamas': xxx")
    assert len(found.upstream_error.text) <= 300


@pytest.mark.parametrize("status", [401, 403, 429])
def test_what_a_worker_says_to_the_gateway_is_not_for_clients(status: int) -> None:
    assert refused(status, "your key is wrong").upstream_error is None


def test_other_shapes_are_not_for_clients_either() -> None:
    found = taken("generate").read_error
    assert found is not None
    assert found(500, {}, b"<html>secret</html>").upstream_error is None
    assert found(503, {"retry-after": "7"}, b"").retry_after == 7


@pytest.mark.parametrize("more", [b"", STREAM[0]], ids=["alone", "with what follows"])
def test_a_stream_s_first_failure_is_framed(more: bytes) -> None:
    found = taken("generate_stream").read_error
    assert found is not None
    assert found(400, {}, BROKEN + more).upstream_error == TOLD


# --- what the client hears ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told", "strict", "sane"),
    [
        (MalformedRequest("-"), UpstreamErrorText(500, "no JSON"), 500, 400),
        (UnsupportedFeature("-"), UpstreamErrorText(200, "one response"), 200, 400),
        (WorkerFailed("-"), UpstreamErrorText(404, "no model"), 404, 400),
        (WorkerFailed("-"), UpstreamErrorText(400, "boom", in_stream=True), 400, 400),
        (WorkerFailed("-"), UpstreamErrorText(400, "boom"), 400, 400),
        (Overloaded("-"), UpstreamErrorText(503, "later"), 503, 503),
    ],
)
def test_what_was_told_is_passed_on(
    error: GatewayError, told: UpstreamErrorText, strict: int, sane: int
) -> None:
    error.upstream_error = told
    asked = call("generate_stream", b"{")
    kind = "text/event-stream; charset=utf-8" if told.in_stream else "application/json"
    said = b'{"error":"%b"}' % told.text.encode()

    reply = VLLM.encode_error(error, asked)
    assert (reply.status, dict(reply.headers)["Content-Type"]) == (strict, kind)
    assert reply.body == (b"data: %b\n\n" % said if told.in_stream else said)

    reply = Triton("vllm", status="sane").encode_error(error, asked)
    assert (reply.status, reply.body) == (sane, said)
    assert dict(reply.headers)["Content-Type"] == "application/json"
