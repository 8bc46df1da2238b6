"""Sticky splits and rules of a running gateway, in every protocol of its listener."""

import hashlib
from collections.abc import Mapping

import httpx
import pytest

from gateway.routing.traffic_split import TrafficSplit
from tests.conftest import RunningGateway, Serve


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


FRONT = """
listeners: [{address: "127.0.0.1:0", protocols: [openai, triton, databricks]}]
backends:
  one: {kind: echo, script: [first]}
  two: {kind: echo, script: [second]}
  small: {kind: echo, script: [small]}
  gone: {protocol: openai, workers: ["http://127.0.0.1:1"]}
models:
  chat:
    aliases: [talk]
    versions: {"1": {backend: one}, "2": {backend: two}}
    split: {name: rollout, weights: {"1": 50, "2": 50},
            sticky: [header:x-user-id, body:user, key, address]}
  lucky: {versions: {"1": {backend: one}, "2": {backend: two}},
          split: {weights: {"1": 0, "2": 1}}}
  highest: {versions: {"9": {backend: one}, "10": {backend: two}, next: {backend: one}}}
  small: {backend: small}
  lost: {backend: gone, fallback: [chat]}
routes:
  - {name: testers, when: {model: chat, header: {X-Cohort: beta}}, to: {version: "2"}}
  - {name: infer, when: {model: chat, protocol: triton}, to: {version: "1"}}
  - {name: urgent, when: {model: chat, body: {priority: 5}}, to: {model: small}}
"""
KEYS = f"""\
  - {{name: paid, when: {{model: chat, tag: paid}}, to: {{model: small}}}}
  - {{name: own, when: {{model: chat, key: app}}, to: {{version: "2"}}}}
keys:
  - {{name: web, sha256: "{hash_key("web-key")}", models: [talk]}}
  - {{name: app, sha256: "{hash_key("app-key")}", models: [chat]}}
  - {{name: payer, sha256: "{hash_key("payer-key")}", models: [chat], tags: [paid, early]}}
  - {{name: poor, sha256: "{hash_key("poor-key")}", models: [small], tags: [paid]}}
"""
SPLIT = TrafficSplit({"1": 50, "2": 50}, "rollout")
TEXTS = {"1": "first", "2": "second"}
HELLO = [{"role": "user", "content": "hi"}]


async def send_chat(
    gateway: RunningGateway,
    model: str = "chat",
    headers: Mapping[str, str] | None = None,
    **fields: object,
) -> httpx.Response:
    body = {"model": model, "messages": HELLO, **fields}
    return await gateway.http.post("/v1/chat/completions", json=body, headers=headers)


def get_record_labels(gateway: RunningGateway) -> tuple[str, str, str, str]:
    last = gateway.records[-1]
    return last.model, last.version, last.rule, last.sticky


async def test_sticky_user_gets_the_same_version_at_every_gateway(serve: Serve) -> None:
    fronts = [await serve(FRONT), await serve(FRONT)]
    arms = set()

    for n in range(8):
        version = SPLIT.assign_version(f"user-{n}").version
        arms.add(version)
        for gateway in fronts:
            by_header = await send_chat(gateway, headers={"X-User-Id": f"user-{n}"}, user="someone")
            assert get_record_labels(gateway) == ("chat", version, "", "header:x-user-id")
            by_body = await send_chat(gateway, "talk", user=f"user-{n}", stream=True)
            assert get_record_labels(gateway) == ("chat", version, "", "body:user")
            assert TEXTS[version] in by_header.text
            assert TEXTS[version] in by_body.text

    assert arms == {"1", "2"}


async def test_models_that_clients_list_include_aliases_unless_the_model_hides_them(
    serve: Serve,
) -> None:
    hidden = FRONT.replace("aliases: [talk]", "aliases: [talk]\n    list_aliases: false")

    for text, names in ((FRONT, ["chat", "talk"]), (hidden, ["chat"])):
        gateway = await serve(text)
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed][: len(names) + 1] == [*names, "lucky"]
        response = await send_chat(gateway, "talk")
        assert response.status_code == 200


async def test_sticky_assignment_uses_the_socket_address_and_ignores_forwarded_headers(
    serve: Serve,
) -> None:
    gateway = await serve(FRONT)
    version = SPLIT.assign_version("127.0.0.1").version

    for n in range(4):
        await send_chat(
            gateway, headers={"X-Forwarded-For": f"192.0.2.{n}", "Forwarded": f"for=192.0.2.{n}"}
        )
        assert get_record_labels(gateway) == ("chat", version, "", "address")


async def test_sticky_assignment_uses_the_api_key_name(serve: Serve) -> None:
    gateway = await serve(FRONT + KEYS)

    response = await send_chat(gateway, headers={"Authorization": "Bearer web-key"})

    assert response.status_code == 200
    assert get_record_labels(gateway) == ("chat", SPLIT.assign_version("web").version, "", "key")


@pytest.mark.parametrize(
    ("headers", "fields", "labelled"),
    [
        ({"x-cohort": "beta"}, {"priority": 5}, ("chat", "2", "testers", "")),
        ({}, {"priority": 5}, ("small", "1", "urgent", "")),
        ({"x-cohort": "Beta", "x-user-id": "u"}, {}, ("chat", "", "", "header:x-user-id")),
    ],
)
async def test_first_matching_route_applies(
    serve: Serve,
    headers: dict[str, str],
    fields: dict[str, object],
    labelled: tuple[str, str, str, str],
) -> None:
    gateway = await serve(FRONT)

    response = await send_chat(gateway, "chat", headers, **fields)

    model, version, *why = labelled
    assert response.status_code == 200
    assert response.json()["model"] == "chat"
    assert get_record_labels(gateway) == (model, version or SPLIT.assign_version("u").version, *why)


async def test_route_can_match_one_protocol(serve: Serve) -> None:
    gateway = await serve(FRONT)

    response = await gateway.http.post("/v2/models/chat/generate", json={"text_input": "hi"})
    other = await gateway.http.post("/serving-endpoints/chat/invocations", json={"messages": HELLO})

    assert response.json()["text_output"].endswith("first")
    assert gateway.records[0].rule == "infer"
    assert other.status_code == 200
    assert gateway.records[1].rule == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/chat/versions/1/generate", {"text_input": "hi"}),
        ("/v1/chat/completions", {"model": "chat@1", "messages": HELLO, "priority": 5}),
        ("/serving-endpoints/chat@1/invocations", {"messages": HELLO}),
        ("/serving-endpoints/chat/served-models/1/invocations", {"messages": HELLO}),
    ],
)
async def test_pinned_version_overrides_routes_and_is_recorded(
    serve: Serve, path: str, body: dict[str, object]
) -> None:
    gateway = await serve(FRONT)

    response = await gateway.http.post(path, json=body, headers={"x-cohort": "beta"})

    assert response.status_code == 200
    assert "first" in response.text
    assert get_record_labels(gateway) == ("chat", "1", "", "pinned")


async def test_model_without_a_split_uses_the_highest_version(serve: Serve) -> None:
    gateway = await serve(FRONT)

    assert "second" in (await send_chat(gateway, "highest")).text
    assert get_record_labels(gateway) == ("highest", "10", "", "")
    assert "first" in (await send_chat(gateway, "highest@next")).text


@pytest.mark.parametrize(
    ("key", "status", "labelled"),
    [
        ("payer-key", 200, ("small", "1", "paid", "")),
        ("app-key", 200, ("chat", "2", "own", "")),
        ("poor-key", 404, ("", "", "", "")),
    ],
)
async def test_key_permission_is_checked_against_the_requested_model(
    serve: Serve, key: str, status: int, labelled: tuple[str, str, str, str]
) -> None:
    gateway = await serve(FRONT + KEYS)

    response = await send_chat(gateway, headers={"Authorization": f"Bearer {key}"})

    assert response.status_code == status
    assert get_record_labels(gateway) == labelled


async def test_fallback_keeps_the_sticky_assignment(serve: Serve) -> None:
    gateway = await serve(FRONT)

    for n in range(4):
        response = await send_chat(gateway, "lost", headers={"x-user-id": f"user-{n}"})
        version = SPLIT.assign_version(f"user-{n}").version
        assert TEXTS[version] in response.text
        assert get_record_labels(gateway) == ("chat", version, "", "header:x-user-id")


async def test_request_record_does_not_contain_the_user_id(serve: Serve) -> None:
    gateway = await serve(FRONT)
    await send_chat(gateway, headers={"x-user-id": "somebody-in-particular"})

    assert "somebody" not in repr(gateway.records)


async def test_malformed_body_with_sticky_body_field_returns_400(serve: Serve) -> None:
    gateway = await serve(FRONT)

    for body in (b'{"model":"chat","user":', b'{"model":"chat","user":"\xff"}', b"[]", b""):
        response = await gateway.http.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


async def test_request_attributes_are_not_built_without_routes_or_sticky_settings(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the request was read")

    gateway = await serve(FRONT)
    monkeypatch.setattr("gateway.pipeline.state.RequestAttributes", never)

    assert (await send_chat(gateway, "lucky", user="u")).status_code == 200
    assert (await send_chat(gateway, "chat@1", user="u")).status_code == 200
    assert (await send_chat(gateway, "chat", user="u")).status_code == 500
