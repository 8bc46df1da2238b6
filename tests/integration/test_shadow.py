"""Shadowed requests are copies for another target and never affect the original."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from backends.interfaces import StreamItems
from gateway.pipeline.shadow_comparison import ShadowComparison
from protocols.core.events import StreamEnd, TextDelta
from tests.integration.shadow_config import (
    ECHO_AS_SHADOW,
    FAULTY_REPLIES,
    HELLO,
    NO_SHADOW,
    SHADOW,
    STREAM,
    SUCCEEDING,
    StartGateway,
    build_echo_config,
    build_worker_config,
    get_visible_response,
    run_gateways,
)
from tests.support.fakes import ScriptedWorker, chunked, make_reply


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Starts gateways with shadows."""
    async with run_gateways() as start:
        yield start


# --- comparisons and metrics ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_shadow_report_has_both_responses_and_the_client_gets_the_primary(
    start_gateway: StartGateway, *, stream: bool
) -> None:
    gateway = await start_gateway(build_echo_config("a, b, d"))

    response = await gateway.ask(stream=stream)
    comparison = await gateway.wait_for_comparison()

    assert '"d"' not in response.text
    assert response.headers["x-served-model"] == "1"
    assert (comparison.id, comparison.shadow_id) == ("id-0", "id-0-shadow")

    main, shadow = comparison.primary, comparison.shadow
    assert (main.model, main.version, main.outcome, main.error) == ("chat", "1", "ok", "")
    assert (shadow.model, shadow.version, shadow.outcome, shadow.error) == ("chat", "2", "ok", "")
    for side in (main, shadow):
        assert (side.finish_reasons, side.tokens, side.length) == (("eos",), 3, 3)
        assert side.first_token is not None
        assert 0 <= side.first_token <= side.duration
    assert comparison.equal is False
    assert len(gateway.records) == 1


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({}, True),
        ({"stream": True}, True),
        ({"n": 2}, True),
        ({"temperature": 0.5}, None),
        ({"temperature": None}, None),
        ({"tools": [{"type": "function", "function": {"name": "look"}}],
          "tool_choice": "required"}, True),
    ],
)  # fmt: skip
async def test_only_deterministic_responses_are_compared(
    start_gateway: StartGateway, fields: dict[str, Any], *, equal: bool | None
) -> None:
    gateway = await start_gateway(build_echo_config())
    response = await gateway.ask(**fields)

    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200
    assert comparison.equal is equal
    assert (comparison.primary.outcome, comparison.shadow.outcome) == ("ok", "ok")


async def test_embeddings_are_shadowed_but_not_compared(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(build_echo_config())
    response = await gateway.http.post(
        "/v1/embeddings", json={"model": "chat", "input": ["a", "b"]}
    )

    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200
    assert comparison.equal is None
    assert comparison.shadow.outcome == "ok"
    assert comparison.shadow.first_token is not None


async def test_shadow_report_contains_no_prompt_or_response_text(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(build_echo_config("secret-of-the-shadow"))
    response = await gateway.ask(
        messages=[{"role": "user", "content": "secret-of-the-client"}], user="somebody"
    )
    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200

    line = msgspec.json.encode(comparison)
    assert b"secret" not in line
    assert b"somebody" not in line
    assert line.startswith(b'{"kind":"shadow","id":"id-0","shadow_id":"id-0-shadow"')


async def test_pinned_requests_are_not_shadowed(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(build_echo_config())
    for model in ("chat@1", "chat@2"):
        assert (await gateway.ask(model=model)).status_code == 200
    assert (await gateway.ask()).status_code == 200

    await gateway.wait_for_comparison()

    assert [one.id for one in gateway.comparisons] == ["id-2"]


async def test_model_without_shadow_settings_has_no_shadow_report(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(build_echo_config(shadow=NO_SHADOW))
    await gateway.ask()
    assert gateway.comparisons == []


async def test_request_is_not_shadowed_to_its_own_version(start_gateway: StartGateway) -> None:
    rule = '{name: testers, when: {model: chat, header: {x-cohort: beta}}, to: {version: "2"}}'
    gateway = await start_gateway(f"{build_echo_config()}routes: [{rule}]\n")
    await gateway.ask({"x-cohort": "beta"})
    await gateway.ask()

    await gateway.wait_for_comparison()

    assert [one.id for one in gateway.comparisons] == ["id-1"]


async def test_dry_run_is_not_shadowed(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(build_echo_config() + 'admin: {address: "127.0.0.1:0"}\n')
    question = {"path": "/v1/chat/completions", "body": {"model": "chat", "messages": HELLO}}
    explained = await gateway.http.post(f"{gateway.urls[-1]}/-/explain", json=question)
    await gateway.ask()

    await gateway.wait_for_comparison()

    assert explained.status_code == 200
    assert "chat" in explained.text
    assert [one.id for one in gateway.comparisons] == [gateway.records[-1].id]


# --- requests to the shadow target ----------------------------------------------------------------


async def test_shadow_request_is_translated_without_client_headers(
    start_gateway: StartGateway,
) -> None:
    reply = make_reply(b'{"text_output":"abc","model_name":"new","model_version":"1"}')
    async with ScriptedWorker([reply]) as worker:
        gateway = await start_gateway(build_worker_config(worker, protocol="triton"))
        response = await gateway.ask(
            {
                "X-Interlingua-Strict": "1",
                "x-interlingua-timeout": "20",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "Authorization": "Bearer a-key",
            },
            max_tokens=7,
            top_k=3,
            request_id="mine",
        )
        comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200

    [sent] = [one for one in worker.requests if one.method == "POST"]
    body = json.loads(sent.body)
    assert sent.path == "/v2/models/new/generate"
    assert "hi" in body["text_input"]
    assert "mine" not in sent.body.decode()
    assert sent.headers["x-request-id"] == "id-0-shadow"
    assert not {"traceparent", "authorization", "x-interlingua-strict"} & sent.headers.keys()
    assert comparison.shadow.outcome == "ok"
    assert comparison.shadow.length == 3
    assert comparison.unsupported_parameters


async def test_passthrough_response_is_compared_by_its_events(start_gateway: StartGateway) -> None:
    async with ScriptedWorker([chunked(*STREAM)]) as worker:
        gateway = await start_gateway(build_worker_config(worker, text=ECHO_AS_SHADOW))
        alone = await start_gateway(
            build_worker_config(worker, text=ECHO_AS_SHADOW, shadow=NO_SHADOW)
        )
        answers = [await one.ask(stream=True) for one in (gateway, alone)]
        comparison = await gateway.wait_for_comparison()

    assert get_visible_response(answers[0]) == get_visible_response(answers[1])
    assert answers[0].text.count("data: ") == len(STREAM) + 1  # and one with the role
    assert (
        comparison.primary.length,
        comparison.primary.finish_reasons,
        comparison.primary.outcome,
    ) == (
        3,
        ("eos",),
        "ok",
    )
    assert comparison.equal is True


# --- effect on the original -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("trouble", FAULTY_REPLIES)
async def test_shadow_failures_do_not_change_the_primary_response(
    start_gateway: StartGateway, trouble: str, *, stream: bool
) -> None:
    well = trouble in SUCCEEDING
    shadow = f'shadow: {{to: "2", share: 100%, timeout: {"9s" if well else "100ms"}}}'

    async with ScriptedWorker(FAULTY_REPLIES[trouble]) as worker:
        gateway = await start_gateway(build_worker_config(worker, shadow=shadow))
        alone = await start_gateway(build_worker_config(worker, shadow=NO_SHADOW))
        answers = [await one.ask(stream=stream) for one in (gateway, alone, gateway, alone)]
        comparison = await gateway.wait_for_comparison(2)

    assert answers[0].status_code == 200
    assert get_visible_response(answers[0]) == get_visible_response(answers[1])
    assert get_visible_response(answers[2]) == get_visible_response(answers[3])
    for one in gateway.records:
        assert (one.outcome, one.error, one.failed_attempts) == ("ok", "", ())
    assert comparison.primary.outcome == "ok"
    assert (comparison.shadow.outcome == "ok") is well
    assert bool(comparison.shadow.error) is not well


async def test_rejected_request_has_the_same_error_with_and_without_shadow(
    start_gateway: StartGateway,
) -> None:
    gateway, alone = (
        await start_gateway(build_echo_config()),
        await start_gateway(build_echo_config(shadow=NO_SHADOW)),
    )
    answers = [await one.ask(temperature=9) for one in (gateway, alone)]

    comparison = await gateway.wait_for_comparison()

    assert answers[0].status_code == 400
    assert get_visible_response(answers[0]) == get_visible_response(answers[1])
    for side in (comparison.primary, comparison.shadow):
        assert (side.outcome, side.error) == ("client_error", "InvalidParameter")
    assert comparison.equal is None


async def test_internal_error_in_the_shadow_does_not_affect_the_primary(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise RuntimeError("a bug")

    gateway = await start_gateway(build_echo_config())
    monkeypatch.setattr("gateway.pipeline.shadow.apply_model_settings", never)
    response = await gateway.ask()

    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200
    assert (comparison.shadow.outcome, comparison.shadow.error) == (
        "gateway_error",
        "InternalError",
    )


async def test_failing_shadow_reporter_does_not_affect_the_primary(
    start_gateway: StartGateway,
) -> None:
    def never(shadowed: ShadowComparison) -> None:
        raise OSError(f"nowhere to write {shadowed.id}")

    gateway, alone = (
        await start_gateway(build_echo_config()),
        await start_gateway(build_echo_config(shadow=NO_SHADOW)),
    )
    gateway.shadows.add_reporter(never)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for stream in (True, False):
        answers = [await one.ask(stream=stream) for one in (gateway, alone)]
        assert get_visible_response(answers[0]) == get_visible_response(answers[1])
    await gateway.wait_for_comparison(2)


async def test_incomplete_shadow_response_is_reported_as_broken_stream(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half() -> StreamItems:
        yield None, [TextDelta("a"), StreamEnd()]

    gateway = await start_gateway(build_echo_config())
    monkeypatch.setattr("gateway.pipeline.shadow.send_emulated", lambda *_: (half(), tuple))
    await gateway.ask()

    comparison = await gateway.wait_for_comparison()

    assert (comparison.shadow.outcome, comparison.shadow.error) == ("worker_error", "StreamBroken")
    assert comparison.equal is None


async def test_internal_error_in_the_primary_is_reported_as_gateway_error(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise RuntimeError("a bug")

    gateway = await start_gateway(build_echo_config())
    monkeypatch.setattr("gateway.pipeline.strategies.apply_model_settings", never)
    response = await gateway.ask()

    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 500
    assert (comparison.primary.outcome, comparison.primary.error) == (
        "gateway_error",
        "InternalError",
    )
    assert comparison.shadow.outcome == "ok"


async def test_response_of_a_fallback_is_compared_with_the_shadow(
    start_gateway: StartGateway,
) -> None:
    text = build_echo_config().replace(
        "kind: echo, script: [a, b, c]}", "kind: echo, fail: {mode: error}}", 1
    )
    text = text.replace("SHADOW", "") + "  spare: {backend: spare}\n"
    text = text.replace("  two:", "  spare: {kind: echo, script: [a, b, c]}\n  two:", 1)
    gateway = await start_gateway(text.replace(SHADOW, f"{SHADOW}, fallback: [spare]"))
    response = await gateway.ask()

    comparison = await gateway.wait_for_comparison()

    assert response.status_code == 200
    assert (comparison.primary.model, comparison.primary.version, comparison.primary.length) == (
        "spare",
        "1",
        3,
    )
    assert comparison.equal is True
