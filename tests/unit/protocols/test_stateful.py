"""Every field that refers to server state has a decision, and the decision holds."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pytest
from msgspec import Raw
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway.config.registry import ProtocolRegistry
from protocols import PROTOCOLS
from protocols.anthropic import requests as anthropic
from protocols.core.errors import ClientError, StoredObjectNotFound, UnsupportedFeature
from protocols.core.loss import UnsupportedParameter
from protocols.core.stateful import StatefulField, refuse_lost_state
from protocols.params import ParamTableProvider

NAME: Final = re.compile(
    r"(?:^|_)(previous|thread|conversation|container|session|sequence|cache|batch|store|background|"
    r"file|continue|resume|parent|context|memory|compaction|prompt|credit|profile)(?:_|$)"
)
"""Words in names of fields that may refer to server state."""
SDK_FIELDS: Final = {
    "openai": {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
    },
    "openai responses": {*response_create_params.ResponseCreateParamsBase.__annotations__},
    "anthropic": {
        "betas", "billing_policy", "cache_control", "compaction", "container", "context_management",
        "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "max_tokens",
        "mcp_servers", "messages", "metadata", "model", "output_config", "output_format",
        "service_tier", "speed", "stop_sequences", "stream", "system", "thinking", "thread",
        "tool_choice", "tools", "user_profile_id", "workspace_id",
    },  # anthropic (Python) 2.14, MessageCreateParams of the beta API
}  # fmt: skip
STATELESS: Final = {
    "prompt": "a text",
    "prompt_logprobs": "of this request",
    "truncate_prompt_tokens": "of this request",
    "use_raw_prompt": "a text without template",
    "add_generation_prompt": "of this request",
    "continue_final_message": "of this request's last message",
    "file": "a content part with data, or with a file_id, which is in the table",
    "file_data": "the file itself",
    "batch_size": "TGI's typical name of a limit",
    "usage_context": "labels of Databricks' usage tables",
    "stop_sequence": "a text",
    "num_return_sequences": "how many answers",
    "stop_sequences": "texts",
}
"""Names with such a word that refer to no state, and why."""


def list_request_fields(protocol: str) -> Iterator[str]:
    """Return a protocol's request fields: parameter tables, schemas, and clients' types."""
    registry = ProtocolRegistry(PROTOCOLS)
    for profile in registry.get_profiles(protocol):
        adapter = registry.create_adapter(protocol, profile, {})
        assert isinstance(adapter, ParamTableProvider)
        for rows in adapter.param_tables.values():
            yield from (row.wire.rpartition(".")[2] for row in rows)
    yield from SDK_FIELDS.get(protocol, ())
    if protocol == "openai":
        yield from SDK_FIELDS["openai responses"]
    if protocol == "anthropic":
        yield from anthropic._SERVICE_FIELDS


def list_fields(protocol: str) -> Sequence[StatefulField]:
    return ProtocolRegistry(PROTOCOLS).create_adapter(protocol, None, {}).stateful_fields


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_field_that_may_name_state_has_a_decision(protocol: str) -> None:
    named = {name for name in list_request_fields(protocol) if NAME.search(name)}
    decided = {one.field.rpartition(".")[2] for one in list_fields(protocol)}

    assert named - decided - STATELESS.keys() == set()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_decision_has_a_reason_and_a_sentence_for_each_refusal(protocol: str) -> None:
    for one in list_fields(protocol):
        assert one.reason
        assert bool(one.refusal) is (one.decision in ("refused", "forwarded")), one.field


def drop_field(protocol: str, field: str, value: Any) -> None:
    values = {field: Raw(msgspec.json.encode(value))}
    refuse_lost_state(list_fields(protocol), values, [UnsupportedParameter(field, "dropped")])


ROWS: Final = [
    (name, one) for name in PROTOCOLS for one in list_fields(name) if one.decision != "stored"
]


@pytest.mark.parametrize(("protocol", "row"), ROWS, ids=lambda one: getattr(one, "field", one))
def test_target_that_drops_a_field_follows_the_table(protocol: str, row: StatefulField) -> None:
    for start in row.starts:
        drop_field(protocol, row.field, start)
    if row.decision == "reported":
        drop_field(protocol, row.field, "x")
        return

    with pytest.raises(ClientError) as excinfo:
        drop_field(protocol, row.field, "x")
    assert (excinfo.value.param, excinfo.value.message) == (row.field, row.refusal)


@pytest.mark.parametrize("value", [None, False, "", [], {}, 0])
def test_field_without_a_value_refers_to_nothing(value: Any) -> None:
    drop_field("anthropic", "container", value)


@pytest.mark.parametrize(
    "name", ["previous_interaction_id", "conversation_id", "parent_message_id", "batch_id"]
)
def test_unknown_field_whose_name_refers_to_earlier_requests_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match="keep nothing between requests"):
        drop_field("ovms", name, "x")


@pytest.mark.parametrize("name", ["mirostat", "max_batch", "num_thread", "sequence_length", "seed"])
def test_unknown_field_of_another_kind_is_a_loss_like_any_other(name: str) -> None:
    drop_field("ovms", name, "x")


def test_parameter_that_the_target_gets_in_another_form_is_not_refused() -> None:
    losses = [UnsupportedParameter("container", "renamed"), UnsupportedParameter("n", "dropped")]

    refuse_lost_state(list_fields("anthropic"), {}, losses)


@pytest.mark.parametrize("raw", [b'"\xff"', b"[" * 100_000])
def test_value_that_can_not_be_decoded_is_refused(raw: bytes) -> None:
    losses = [UnsupportedParameter("container", "dropped")]

    with pytest.raises(UnsupportedFeature):
        refuse_lost_state(list_fields("anthropic"), {"container": Raw(raw)}, losses)


def test_lost_thread_is_a_missing_object_with_the_name_of_the_message() -> None:
    with pytest.raises(StoredObjectNotFound) as excinfo:
        drop_field("anthropic", "thread", {"type": "continue", "previous_message_id": "msg_7"})

    assert excinfo.value.id == "msg_7"
