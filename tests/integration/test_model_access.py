"""A key sees and uses only its own models, in every protocol."""

import asyncio
import hashlib
import http.client
import json
import re
from typing import Any, get_args

import httpx
import pytest

from gateway.auth import failed_keys
from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.core.catalog import ModelTask
from protocols.core.interfaces import Endpoint
from tests.conftest import RunningGateway, Serve

REGISTRY = ProtocolRegistry(PROTOCOLS)
NAMES = ("narrow", "wide", "explaining")
DIGESTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES}
KEYS = f"""
keys:
  - {{name: narrow, sha256: "{DIGESTS["narrow"]}", models: [open]}}
  - {{name: wide, sha256: "{DIGESTS["wide"]}"}}
  - {{name: explaining, sha256: "{DIGESTS["explaining"]}", models: [open], explain: true}}
"""
MODELS = """
backends: {e: {kind: echo, script: [Hello]}}
models:
  open:
    aliases: [public]
    versions: {"1": {backend: e, model: internal-a}, "2": {backend: e, model: internal-b}}
    split: {weights: {"1": 70, "2": 30}}
  hidden: {backend: e, aliases: [concealed], model: internal-c}
"""
ADAPTERS = {
    name: REGISTRY.load_adapter_class(name)
    for name in REGISTRY.names
    if REGISTRY.serves_clients(name)
}
PER_REQUEST_HEADERS = {
    "x-request-id", "request-id", "date", "req-id", "requestuuid", "starttime", "connection"
}  # fmt: skip
UNKNOWN_NAMES = {
    "hidden": "absent",
    "concealed": "not-there",
    "hidden@1": "absent@1",
    "hidden@9": "absent@9",
}
OPTIONS = {"ovms": "{name: ovms, v1: true, kserve: true}"}


def make_config(protocol: str, keys: str = KEYS) -> str:
    listener = OPTIONS.get(protocol, protocol)
    return f'listeners: [{{address: "127.0.0.1:0", protocols: [{listener}]}}]{MODELS}{keys}'


def list_endpoints(protocol: str) -> list[Endpoint]:
    options: dict[str, Any] = {"v1": True, "kserve": True} if protocol == "ovms" else {}
    return list(ADAPTERS[protocol](None, **options).endpoints)


def build_path(endpoint: Endpoint, model: str) -> str:
    return re.sub(r"{(\w+)}", lambda m: {"version": "1"}.get(m[1], model), endpoint.path)


def build_body(model: str) -> dict[str, Any]:
    """Build a body in which every protocol finds the model's name."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "text_input": "hi",
        "inputs": "hi",
        "id": "7",
    }


async def send(
    gateway: RunningGateway, endpoint: Endpoint, model: str, key: str
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Send a request and return the response without the parts that differ each time."""

    def exchange() -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        try:
            body = b"" if endpoint.method == "GET" else json.dumps(build_body(model)).encode()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            headers["x-interlingua-explain"] = "1"
            connection.request(endpoint.method, build_path(endpoint, model), body, headers)
            response = connection.getresponse()
            copied_headers = [
                (name, re.sub(r'"seconds":{[^}]*}', "", value))
                for name, value in response.getheaders()
                if name.lower() not in PER_REQUEST_HEADERS
            ]
            content = response.read()
            for name in ("request-id", "x-request-id"):  # which the body repeats
                content = content.replace(response.getheader(name, "").encode(), b"")
            return response.status, copied_headers, content
        finally:
            connection.close()

    return await asyncio.to_thread(exchange)


@pytest.mark.parametrize("protocol", ADAPTERS)
@pytest.mark.parametrize("key", ["narrow", "explaining"])
@pytest.mark.parametrize(("name", "unknown"), UNKNOWN_NAMES.items())
async def test_forbidden_model_gets_response_of_unknown_model(
    serve: Serve, protocol: str, key: str, name: str, unknown: str
) -> None:
    gateway = await serve(make_config(protocol))
    for endpoint in list_endpoints(protocol):
        forbidden = await send(gateway, endpoint, name, key)
        status, headers, body = await send(gateway, endpoint, unknown, key)
        expected = status, headers, body.replace(unknown.encode(), name.encode())
        assert forbidden == expected, f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("protocol", ADAPTERS)
async def test_listings_name_only_models_of_key(serve: Serve, protocol: str) -> None:
    gateway = await serve(make_config(protocol))
    listed = 0

    for endpoint in list_endpoints(protocol):
        if endpoint.task != "inform" or "{" in endpoint.path:
            continue
        _, _, narrow = await send(gateway, endpoint, "open", "narrow")
        _, _, wide = await send(gateway, endpoint, "open", "wide")
        assert b"hidden" not in narrow, endpoint.path
        assert b"internal" not in narrow + wide, endpoint.path
        assert b"traffic" not in narrow + wide, endpoint.path
        listed += b"hidden" in wide

    assert listed


@pytest.mark.parametrize("protocol", ADAPTERS)
async def test_models_of_every_task_are_listed_and_described(serve: Serve, protocol: str) -> None:
    models = "".join(f"  {task}: {{backend: e, task: {task}}}\n" for task in get_args(ModelTask))
    listener = OPTIONS.get(protocol, protocol)
    gateway = await serve(
        f'listeners: [{{address: "127.0.0.1:0", protocols: [{listener}]}}]\n'
        f"backends: {{e: {{kind: echo, script: [Hello]}}}}\nmodels:\n{models}"
    )
    for endpoint in list_endpoints(protocol):
        if endpoint.task != "inform" or endpoint.method != "GET":
            continue
        for task in get_args(ModelTask):
            _, _, body = await send(gateway, endpoint, task, "")
            assert b"the gateway failed" not in body, (endpoint.path, task)


@pytest.mark.parametrize("protocol", ADAPTERS)
async def test_responses_without_key_depend_on_no_model(
    serve: Serve, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_keys, "_BURST", 100_000)  # each endpoint is called with a wrong key
    gateway = await serve(make_config(protocol))
    for endpoint in list_endpoints(protocol):
        hidden = await send(gateway, endpoint, "hidden", "wrong")
        unknown = await send(gateway, endpoint, "absent", "wrong")
        assert b"hidden" not in hidden[2], endpoint.path
        assert hidden == unknown, endpoint.path
        assert endpoint.public == (gateway.records[-1].error != "Unauthorized"), endpoint.path


async def test_log_tells_why_model_was_not_found(serve: Serve) -> None:
    gateway = await serve(make_config("openai"))
    for model in ("hidden", "absent"):
        headers = {"authorization": "Bearer narrow"}
        response = await gateway.http.post(
            "/v1/chat/completions", json=build_body(model), headers=headers
        )
        assert response.status_code == 404

    assert [record.error for record in gateway.records] == ["Forbidden", "ModelNotFound"]


async def read_endpoint(gateway: RunningGateway, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await gateway.http.get("/api/2.0/serving-endpoints/open", headers=headers)


@pytest.mark.parametrize(
    ("keys", "key", "is_shown"),
    [(KEYS, "explaining", True), (KEYS, "narrow", False), (KEYS, "wide", False), ("", None, True)],
)
async def test_targets_are_listed_only_to_callers_that_may_explain(
    serve: Serve, keys: str, key: str | None, is_shown: bool
) -> None:
    gateway = await serve(make_config("databricks", keys))
    config = (await read_endpoint(gateway, key)).json()["config"]
    names = [entity["entity_name"] for entity in config["served_entities"]]

    assert [entity["name"] for entity in config["served_entities"]] == ["1", "2"]

    if is_shown:
        shares = [route["traffic_percentage"] for route in config["traffic_config"]["routes"]]
        assert (names, shares) == (["internal-a", "internal-b"], [70, 30])
    else:
        assert names == ["open", "open"]
        assert "traffic_config" not in config


SHARED_PATH = f"""
listeners: [{{address: "127.0.0.1:0", protocols: [triton, mindie]}}]
backends: {{e: {{kind: echo}}}}
models: {{open: {{backend: e}}, hidden: {{backend: e, protocol: mindie}}}}
{KEYS}
"""


@pytest.mark.parametrize(
    ("key", "is_like_unknown"), [("narrow", True), ("wrong", True), ("wide", False)]
)
async def test_forbidden_model_chooses_no_protocol(
    serve: Serve, key: str, is_like_unknown: bool
) -> None:
    gateway = await serve(SHARED_PATH)
    for model in ("hidden", "absent"):
        await send(gateway, Endpoint("POST", "/v2/models/{model}/generate"), model, key)
    hidden, absent = (record.protocol for record in gateway.records)

    assert (hidden == absent) is is_like_unknown
