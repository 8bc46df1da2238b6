"""Tool calls of unknown types, and what workers say of the stop that matched."""

import msgspec
import pytest

from protocols.chat.errors import build_error_body
from protocols.chat.tool_call_assembler import ToolCallAssembler
from protocols.chat.wire_responses import WireDelta
from protocols.core.errors import UnsupportedFeature
from protocols.core.events import ResponseExtra, ToolCallStart
from protocols.core.response_losses import find_losses


def read(assembler: ToolCallAssembler, *calls: dict[str, object]) -> list[object]:
    return [*assembler.read_delta(msgspec.convert({"tool_calls": calls}, WireDelta))]


def test_call_of_an_unknown_type_ends_before_the_next_one_and_takes_later_pieces() -> None:
    assembler = ToolCallAssembler(0, "p")
    first = {"index": 0, "id": "c1", "type": "mcp"}
    second = {"index": 1, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    read(assembler, first)
    before, start, _ = read(assembler, second)
    [late] = read(assembler, {"index": 0, "function": {"arguments": "x"}})

    assert isinstance(before, ResponseExtra)
    assert (before.scope, before.call_index) == ("unknown_call", 0)
    assert isinstance(start, ToolCallStart)
    assert start.call_index == 1
    assert isinstance(late, ResponseExtra)
    assert late.values == ((("function", "arguments"), "x"),)


def test_index_of_a_message_s_call_is_kept_for_clients_of_the_protocol() -> None:
    call = {"index": 5, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    delta = msgspec.convert({"tool_calls": [call]}, WireDelta)

    first = ToolCallAssembler(0, "p", is_own=True).read_delta(delta, is_message=True)[0]

    assert isinstance(first, ResponseExtra)
    assert first.values == ((("index",), 5),)


class StopEncoder:
    writes_matched_stop = True


@pytest.mark.parametrize(("value", "count"), [("END", 0), (7, 1)])
def test_stop_is_lost_unless_the_encoder_writes_it(value: object, count: int) -> None:
    event = ResponseExtra("p", "choice", ((("stop_reason",), value),))

    assert len([*find_losses(event, StopEncoder())]) == count  # type: ignore[arg-type]


def test_refusal_of_a_worker_has_no_code_of_the_gateway() -> None:
    error = UnsupportedFeature("no", param="x")
    error.worker_protocol = "p"

    assert build_error_body(error)[1].code is None
