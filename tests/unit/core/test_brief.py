"""A request of which little is asked is read when more is, and then once."""

from gateway.core.brief import Brief, request_of
from gateway.core.types import EmbedRequest, GenerateRequest, Request


def test_a_request_is_read_once_and_only_where_it_is_asked_for() -> None:
    read = list[Request]()

    def made() -> Request:
        read.append(GenerateRequest(model="m", kind="chat"))
        return read[-1]

    brief = Brief(read=made, kind="chat")
    assert (brief.kind, brief.stream, brief.priority) == ("chat", False, None)
    assert not read

    assert request_of(brief) is brief.request
    assert [brief.request] == read


def test_a_request_is_its_own_brief() -> None:
    request = EmbedRequest(model="m", inputs=("a",))
    assert request_of(request) is request
    assert request.kind == "embedding"
