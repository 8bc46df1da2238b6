"""The Databricks SDK: a WorkspaceClient with the gateway as its workspace."""

from collections.abc import Callable

import pytest
from databricks.sdk import WorkspaceClient, errors
from databricks.sdk.core import Config
from databricks.sdk.service.serving import (
    ChatMessage,
    ChatMessageRole,
    EndpointStateReady,
    QueryEndpointResponseObject,
)

SAY_HI = [ChatMessage(role=ChatMessageRole.USER, content="say hi")]


@pytest.fixture(scope="module")
def workspace(gateway: str) -> Callable[[str], WorkspaceClient]:
    def sign_in(token: str) -> WorkspaceClient:
        return WorkspaceClient(config=Config(host=gateway, token=token, retry_timeout_seconds=1))

    return sign_in


@pytest.fixture
def client(workspace: Callable[[str], WorkspaceClient], key: str) -> WorkspaceClient:
    return workspace(key)


def test_chat_query(client: WorkspaceClient) -> None:
    response = client.serving_endpoints.query(
        "chat",
        messages=SAY_HI,
        max_tokens=2,
        temperature=0.5,
        n=1,
        stop=["never"],
        extra_params={"top_k": "5"},
        client_request_id="mine",
        usage_context={"team": "a"},
    )

    assert response.object is QueryEndpointResponseObject.CHAT_COMPLETION
    assert response.choices[0].message.role is ChatMessageRole.ASSISTANT
    assert response.choices[0].message.content == "Hello world"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (2, 2)
    assert response.served_model_name == "1"


def test_completion_query(client: WorkspaceClient) -> None:
    response = client.serving_endpoints.query("chat", prompt="say hi")

    assert response.object is QueryEndpointResponseObject.TEXT_COMPLETION
    assert response.choices[0].text == "Hello world!"


def test_embeddings_query(client: WorkspaceClient) -> None:
    response = client.serving_endpoints.query("embed", input=["a", "b c"])

    assert response.object is QueryEndpointResponseObject.LIST
    assert [one.embedding[0] for one in response.data] == [1.0, 3.0]


def test_response_names_the_served_version_of_a_split(client: WorkspaceClient) -> None:
    answers = [client.serving_endpoints.query("ab", messages=SAY_HI) for _ in range(40)]

    names = {(answer.served_model_name, answer.model) for answer in answers}
    assert names == {("first", "model-a"), ("second", "model-b")}


def test_serving_endpoints_are_listed(client: WorkspaceClient) -> None:
    endpoints = {one.name: one for one in client.serving_endpoints.list()}

    assert endpoints["chat"].task == "llm/v1/chat"
    assert endpoints["embed"].task == "llm/v1/embeddings"
    assert endpoints["chat"].state.ready is EndpointStateReady.READY


def test_endpoint_contains_its_traffic_config(client: WorkspaceClient) -> None:
    config = client.serving_endpoints.get("ab").config

    assert [one.entity_name for one in config.served_entities] == ["model-a", "model-b"]
    assert [
        (one.served_model_name, one.traffic_percentage) for one in config.traffic_config.routes
    ] == [("first", 50), ("second", 50)]


@pytest.mark.parametrize(
    ("endpoint", "fields", "exception"),
    [
        ("nope", {}, errors.ResourceDoesNotExist),
        ("chat", {"temperature": 3}, errors.InvalidParameterValue),
        ("failing", {}, errors.InternalError),
        ("short", {"prompt": "one two three four five six seven eight nine"}, errors.BadRequest),
        ("limited", {}, TimeoutError),  # retried until the client's own timeout
        ("down", {}, TimeoutError),
    ],
)
def test_error_response_raises_the_matching_sdk_exception(
    client: WorkspaceClient, endpoint: str, fields: dict[str, object], exception: type[Exception]
) -> None:
    with pytest.raises(exception) as excinfo:
        client.serving_endpoints.query(endpoint, **({"prompt": "say hi"} | fields))

    assert type(excinfo.value) is exception


@pytest.mark.parametrize(
    ("token", "exception"),
    [("wrong", errors.Unauthenticated), ("sk-narrow", errors.ResourceDoesNotExist)],
)
def test_invalid_or_unauthorized_key_is_rejected(
    workspace: Callable[[str], WorkspaceClient], token: str, exception: type[Exception]
) -> None:
    with pytest.raises(exception):
        workspace(token).serving_endpoints.query("chat", prompt="say hi")


def test_unknown_endpoint_raises_resource_does_not_exist(client: WorkspaceClient) -> None:
    with pytest.raises(errors.ResourceDoesNotExist):
        client.serving_endpoints.get("nope")
