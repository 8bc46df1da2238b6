"""The model list: cases W82 and W83."""

import json
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from protocols.core.catalog import ModelFeatures, ModelInfo, ModelState, VersionInfo
from protocols.core.errors import ModelNotFound
from protocols.core.interfaces import ClientRequest
from protocols.openai.endpoints import OpenAI

VERSION = VersionInfo("1", "m", 100)
MODELS = (
    ModelInfo("mock", (VERSION,), aliases=("gpt",), created=7, context_length=8),
    ModelInfo("org/m1", (VERSION,)),
)


class ModelCatalogStub:
    ready = True

    def list_models(self) -> Sequence[ModelInfo]:
        return MODELS

    def find_model(self, model: str, version: str | None = None) -> ModelInfo:
        for one in MODELS:
            if model == one.name or model in one.aliases:
                return one
        raise ModelNotFound(f"no model {model}", model=model)


def test_model_list_response(make_call: Callable[..., ClientRequest]) -> None:
    reply = OpenAI().handle_info_request(make_call("models"), ModelCatalogStub())
    assert json.loads(reply.body) == {
        "object": "list",
        "data": [
            {
                "id": "mock",
                "created": 7,
                "object": "model",
                "owned_by": "interlingua",
                "max_model_len": 8,
            },
            {
                "id": "gpt",
                "created": 7,
                "object": "model",
                "owned_by": "interlingua",
                "max_model_len": 8,
            },
            {"id": "org/m1", "created": 0, "object": "model", "owned_by": "interlingua"},
        ],
    }


def test_model_list_leaves_out_aliases_that_are_not_listed(
    make_call: Callable[..., ClientRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = ModelCatalogStub()
    hidden = [replace(model, list_aliases=False) for model in MODELS]
    monkeypatch.setattr(catalog, "list_models", lambda: hidden)

    reply = OpenAI().handle_info_request(make_call("models"), catalog)

    assert [card["id"] for card in json.loads(reply.body)["data"]] == ["mock", "org/m1"]


def test_model_response_says_what_the_engine_understands_of_a_local_model(
    make_call: Callable[..., ClientRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of OpenAI ignore the key; it is there only for versions that the gateway runs."""
    features = ModelFeatures(chat=True, problem="no marks", schema=True, context_length=512)
    state = ModelState(loaded=True, features=features)
    versions = (replace(VERSION, state=state), replace(VERSION, name="remote"))
    catalog = ModelCatalogStub()
    monkeypatch.setattr(catalog, "list_models", lambda: [ModelInfo("mock", versions)])
    reply = OpenAI().handle_info_request(make_call("models"), catalog)
    (card,) = json.loads(reply.body)["data"]
    assert card["interlingua"] == {
        "versions": {
            "1": {
                "loaded": True,
                "features": {
                    "chat": True,
                    "problem": "no marks",
                    "schema": True,
                    "context_length": 512,
                },
            }
        }
    }


@pytest.mark.parametrize("name", ["org/m1", "mock", "gpt"])
def test_model_response_has_the_requested_name(
    make_call: Callable[..., ClientRequest], name: str
) -> None:
    reply = OpenAI().handle_info_request(
        make_call("model", params={"model": name}), ModelCatalogStub()
    )
    assert json.loads(reply.body)["id"] == name


def test_unknown_model_raises_model_not_found(make_call: Callable[..., ClientRequest]) -> None:
    with pytest.raises(ModelNotFound):
        OpenAI().handle_info_request(make_call("model", params={"model": "x"}), ModelCatalogStub())
