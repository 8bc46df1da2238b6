"""Passthrough rules cost nothing for requests that they do not concern."""

import pytest

from backends.interfaces import Deadline, RequestContext, ignore_memory
from protocols import passthrough
from protocols.core.interfaces import ClientRequest, ResponseContext
from protocols.openai.endpoints import OpenAI
from tests.unit.protocols.conftest import endpoint


def test_a_rule_is_compiled_once_by_the_first_request_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    build = passthrough.build_body_decoder

    def record(rule: passthrough.PassthroughRule, *, skims: bool) -> object:
        compiled.append(rule.path)
        return build(rule, skims=skims)

    monkeypatch.setattr(passthrough, "build_body_decoder", record)
    worker, client = OpenAI("vllm"), OpenAI()

    assert compiled == []

    row = endpoint("chat")
    body = b'{"model":"chat","messages":[{"role":"user","content":"hi"}]}'
    context = RequestContext("r1", Deadline(lambda: 0.0, 60), lambda: 0.0, ignore_memory)
    response_context = ResponseContext("r1", 1, "chat", "v1", "llama", context.clock)
    for _ in range(2):
        request = ClientRequest(row, {}, {}, "", body, row.path)
        assert worker.prepare_passthrough(client, request, response_context) is not None
        assert compiled == ["/v1/chat/completions"]
