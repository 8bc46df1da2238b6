"""Properties of every worker protocol, in each of its profiles."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.registry import load_symbol
from gateway.runtime.build import build_adapter
from protocols import PROTOCOLS
from protocols.core.aggregate import ResponseAccumulator
from protocols.core.errors import WorkerError
from protocols.core.events import ChoiceEnd, Event, StreamEnd, TextDelta, Usage
from protocols.core.interfaces import (
    ClientAdapter,
    ClientRequest,
    ResponseContext,
    UpstreamAdapter,
    UpstreamRequest,
)
from protocols.core.request import (
    GenerationRequest,
    Message,
    SamplingParams,
    StopConditions,
    TextPart,
)
from protocols.prompt import build_prompt
from tests.support.path_routers import get_path_router
from tests.support.requested_parameters import list_requested_parameters


class BidirectionalAdapter(ClientAdapter, UpstreamAdapter, Protocol):
    """An adapter for clients and workers."""


def clock() -> float:
    return 0.0


ABOUT = ResponseContext("r", 1, "m", "1", "w", clock)


def list_profiles() -> Iterator[Any]:
    """Return the worker protocols that are client protocols, too, so that they can play workers."""
    for name, reference in PROTOCOLS.items():
        for profile in load_symbol(reference).profiles:
            adapter = build_adapter(name, profile, {})
            if hasattr(adapter, "encode_request") and hasattr(adapter, "read_routing_info"):
                yield pytest.param(adapter, id=f"{name}-{profile}")
    for profile in ("openai", "vllm"):
        adapter = build_adapter("openai", profile, {"worker_api": "responses"})
        yield pytest.param(adapter, id=f"openai-{profile}-responses")


PROFILES = list(list_profiles())


def check_every_adapter(
    check: Callable[[BidirectionalAdapter], None], *, but: Collection[str] = ()
) -> None:
    """Drawing an example takes far longer than checking it, so that all adapters get each one."""
    for profile in (one for one in PROFILES if one.id not in but):
        try:
            check(*profile.values)
        except BaseException as error:  # pytest.raises fails with one
            error.add_note(str(profile.id))
            raise


text = st.text(min_size=1, max_size=20)
samplings = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0.01, 1),
    top_k=st.none() | st.integers(1, 1000),
    min_p=st.none() | st.floats(0.01, 1),
    seed=st.none() | st.integers(0, 2**62),
    repetition_penalty=st.none() | st.floats(0.5, 2),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
)
stoppings = st.builds(
    StopConditions,
    max_tokens=st.none() | st.integers(1, 10_000),
    min_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(text, max_size=4, unique=True).map(tuple),
    ignore_eos=st.none() | st.booleans(),
)
messages = st.lists(
    st.builds(
        lambda role, turns: Message(role, (TextPart(turns),)),
        st.sampled_from(["system", "user", "assistant"]),
        text,
    ),
    min_size=1,
    max_size=4,
).map(tuple)
requests = st.builds(
    lambda messages, sampling, stopping, n, stream: GenerationRequest(
        model="w",
        kind="chat",
        messages=messages,
        sampling=sampling,
        stopping=stopping,
        n=n,
        stream=stream,
    ),
    messages,
    samplings,
    stoppings,
    st.none() | st.integers(1, 8),
    st.booleans(),
)


def join_turns(messages: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Return the messages with consecutive assistant messages joined."""
    turns: list[tuple[Any, str]] = []
    for role, words in messages:
        if turns and role == turns[-1][0] == "assistant":
            turns[-1] = (role, f"{turns[-1][1]}\n{words}")
        else:
            turns.append((role, words))
    return turns


JOINING_SYSTEM_TEXTS = {"anthropic"}
"""Protocols with a single system text before the conversation."""
LEAVING_OUT_BLANK_TEXTS = {"anthropic"}
"""Their service refuses texts without a visible character."""


def join_system_texts(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the messages with the leading system messages joined by a blank line."""
    count = next((i for i, (role, _) in enumerate(turns) if role != "system"), len(turns))
    if count <= 1:
        return turns
    return [("system", "\n\n".join(text for _, text in turns[:count])), *turns[count:]]


SAME_AS_ABSENT = {"n": 1, "sampling.top_p": 1.0, "sampling.typical_p": 1.0}
"""Values without effect, which an adapter may leave out (TGI rejects 1 for both)."""


SAMPLED_ONLY = {
    f"sampling.{name}" for name in ("temperature", "top_p", "typical_p", "top_k", "seed")
}
"""Parameters without effect on greedy sampling."""


def is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0 or sampling.do_sample is False


@given(request=requests)
def test_parameters_not_reported_as_lost_round_trip(request: GenerationRequest) -> None:
    check_every_adapter(partial(check_round_trip, request))


def check_round_trip(request: GenerationRequest, adapter: BidirectionalAdapter) -> None:
    turns: list[tuple[str, str]] = [(m.role, m.text) for m in request.messages]
    if adapter.name in LEAVING_OUT_BLANK_TEXTS:
        turns = [(role, words) for role, words in turns if words.strip()]
        if all(role == "system" for role, _ in turns):  # the service refuses what is left
            return
    wire = adapter.encode_request(request)
    names = {path: path for path in list_requested_parameters(request)}
    lost = {loss.field for loss in adapter.unsupported_parameters(request, names)}

    decoded = adapter.decode_request(create_client_request(adapter, wire))

    assert isinstance(decoded, GenerationRequest)
    assert (decoded.model, decoded.stream) == ("w", request.stream)

    if decoded.messages:
        if adapter.name in JOINING_SYSTEM_TEXTS:
            turns = join_system_texts(turns)
        if wire.path.endswith("/responses"):  # consecutive items are one turn in this API
            turns = join_turns(turns)
        assert [(m.role, m.text) for m in decoded.messages] == turns
    else:
        assert decoded.prompts == (build_prompt(request, None),)
    for path, value in list_requested_parameters(request).items():
        if path not in lost:  # clients use another name than workers
            foreign = [msgspec.json.decode(raw) for raw in decoded.extra.values()]
            read = decoded.set_fields.get(path, SAME_AS_ABSENT.get(path))
            if adapter.name == "tgi" and path in SAMPLED_ONLY and is_greedy(request.sampling):
                continue  # that server samples whenever it gets one of these
            assert value in (read, *foreign), path


@given(
    texts=st.lists(text, max_size=6),
    size=st.integers(1, 40),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    n=st.integers(1, 3),
)
def test_stream_decodes_the_same_for_any_packet_boundaries(
    texts: list[str], size: int, newline: bytes, n: int
) -> None:
    check_every_adapter(partial(check_stream, texts, size, newline, n))


def check_stream(
    texts: list[str], size: int, newline: bytes, n: int, adapter: BidirectionalAdapter
) -> None:
    request = GenerationRequest(
        model="m", kind="chat", messages=(Message("user", (TextPart("x"),)),), stream=True, n=n
    )
    if any(loss.path == "n" for loss in adapter.unsupported_parameters(request, {})):
        request, n = msgspec.structs.replace(request, n=None), 1
    sent: list[Event] = [TextDelta(one, index) for one in texts for index in range(n)]
    sent += [
        *(ChoiceEnd("eos", index) for index in range(n)),
        Usage(3, len(texts) * n),
        StreamEnd(),
    ]
    wire = encode_worker_stream(adapter, request, sent).replace(b"\n", newline)

    decoder = adapter.create_decoder(request)
    fold = ResponseAccumulator()
    for i in range(0, len(wire), size):
        fold.add(decoder.feed(wire[i : i + size]))
    fold.add(decoder.close())

    response = fold.result()
    assert [choice.text for choice in response.choices] == ["".join(texts)] * n
    assert {choice.finish_reason for choice in response.choices} <= {"eos", "stop", "unknown"}


ENDING_WITH_THE_BODY = {"triton-trtllm", "triton-plain"}
"""Their streams have no end mark: only the connection shows a truncation."""


@given(texts=st.lists(text, min_size=1, max_size=4), share=st.floats(0, 1))
def test_truncated_stream_never_emits_an_end_event(texts: list[str], share: float) -> None:
    check_every_adapter(partial(check_truncated_stream, texts, share), but=ENDING_WITH_THE_BODY)


def check_truncated_stream(texts: list[str], share: float, adapter: BidirectionalAdapter) -> None:
    request = GenerationRequest(
        model="m", kind="chat", messages=(Message("user", (TextPart("x"),)),), stream=True
    )
    begun = encode_worker_stream(adapter, request, [*map(TextDelta, texts)])
    wire = begun[: int(share * len(begun))]
    decoder = adapter.create_decoder(request)

    events = [*decoder.feed(wire)] if wire else []
    with pytest.raises(WorkerError):
        events += decoder.close()

    assert not any(isinstance(event, ChoiceEnd | StreamEnd) for event in events)


def encode_worker_stream(
    adapter: BidirectionalAdapter, request: GenerationRequest, events: list[Event]
) -> bytes:
    """Encode events as a worker of this protocol would."""
    call = create_client_request(adapter, adapter.encode_request(request))
    decoded = cast("GenerationRequest", adapter.decode_request(call))
    return adapter.create_encoder(call, decoded, ABOUT).encode_events(events)


def create_client_request(adapter: ClientAdapter, wire: UpstreamRequest) -> ClientRequest:
    """Decode an upstream request as a worker of this protocol would."""
    path, _, query = wire.path.partition("?")
    match = get_path_router(adapter).find_endpoint(wire.method, path)
    headers = {name.lower(): value for name, value in wire.headers}
    return ClientRequest(match.endpoint, match.params, headers, query, wire.body, path)
