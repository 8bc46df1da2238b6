"""A key with a list of models reaches no other, whatever object of a body names it.

Each object in a request of each client protocol gets a field with another model in turn.
"""

import copy
import re
from typing import Any

import msgspec
import pytest

from gateway.pipeline.model_access import check_named_models, names_only_routed_model
from protocols.core.errors import InvalidParameter
from protocols.core.interfaces import ClientRequest
from tests.property.test_unknown_keys import list_places, list_requests
from tests.support.path_routers import get_adapter, get_path_router

OTHER = "model-of-others"
FREE = re.compile(
    r"metadata|documents\.\d+(\.data)?|"
    r".*\.(arguments|properties(\..*)?)|"
    r"messages\.\d+\.content\.\d+\.input|"
    r"messages\.\d+\.content\.\d+\.document\.data"
)
"""Objects with names of the client's own: what functions get, and what a schema declares."""


def make_call(client: Any, path: str, body: Any) -> ClientRequest:
    match = get_path_router(client).find_endpoint("POST", path)
    text = msgspec.json.encode(body)
    return ClientRequest(match.endpoint, match.params, {}, "", text, path, "r")


def add_field(body: Any, place: tuple[Any, ...], name: str, value: Any) -> Any:
    changed = copy.deepcopy(body)
    target: Any = changed
    for step in place:
        target = target[step]
    target[name] = value
    return changed


async def check(name: str, path: str, body: Any) -> None:
    """Check a request of a key that may use one model. Raises InvalidParameter."""
    call = make_call(get_adapter(name), path, body)
    info = get_adapter(name).read_routing_info(call)
    if info.model == OTHER:  # it is routed, and refused by its name
        raise InvalidParameter("", param="model")
    if not names_only_routed_model(call, info):
        await check_named_models(call, info, {"m"}.__contains__)


@pytest.mark.parametrize("field", ["model", "allowed_models", "Fallbacks", "modelId", "lora_name"])
@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
async def test_another_model_in_any_object_is_refused(
    name: str, path: str, body: dict[str, Any], field: str
) -> None:
    accepted = []
    for place in list_places(body):
        try:
            await check(name, path, add_field(body, place, field, OTHER))
        except InvalidParameter:
            continue
        accepted.append(".".join(map(str, place)))

    assert [place for place in accepted if not FREE.fullmatch(place)] == []


@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
async def test_a_request_that_names_no_other_model_is_accepted(
    name: str, path: str, body: dict[str, Any]
) -> None:
    await check(name, path, body)


@pytest.mark.parametrize(("name", "path", "body"), list(list_requests()))
async def test_a_property_of_a_schema_may_be_called_model(
    name: str, path: str, body: dict[str, Any]
) -> None:
    text = msgspec.json.encode(body).replace(b'"properties":{"a"', b'"properties":{"model"')
    await check(name, path, msgspec.json.decode(text))
