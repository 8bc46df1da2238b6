"""Requests of clients: generate, chat with TGI's own fields, and embeddings."""

from typing import Any

import msgspec
import pytest

from protocols.core.catalog import ModelInfo
from protocols.core.errors import InvalidParameter, MalformedRequest
from protocols.core.interfaces import ClientRequest
from protocols.core.request import (
    EmbeddingRequest,
    ExtraFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    RegexFormat,
)
from protocols.tgi import TGI
from tests.unit.protocols.tgi.conftest import MakeCall

SCHEMA = {"type": "object", "properties": {"a": {}}}
RAW_SCHEMA = msgspec.Raw(msgspec.json.encode(SCHEMA))
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def read(make: MakeCall) -> Any:
    """Decode a generate request with these parameters."""

    def decode(path: str = "/generate", adapter: TGI | None = None, **parameters: Any) -> Any:
        body = {"inputs": "a b", "parameters": parameters}
        return (adapter or TGI(model="m")).decode_request(make(path, body))

    return decode


@pytest.fixture
def chat(make: MakeCall) -> Any:
    """Decode a chat request with these fields."""

    def decode(**fields: Any) -> Any:
        body = {"messages": HI, **fields}
        return TGI(model="m").decode_request(make("/v1/chat/completions", body))

    return decode


def test_input_is_a_raw_prompt(read: Any) -> None:
    request = read()

    assert isinstance(request, GenerationRequest)
    assert (request.kind, request.prompts, request.model) == ("completion", ("a b",), "m")
    assert request.templating.mode == "raw"
    assert not request.stream


def test_input_may_be_a_user_message(read: Any) -> None:
    assert read(adapter=TGI(prompts="chat")).templating.mode == "server"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0), ({"do_sample": False}, 0.0), ({"temperature": 1.0}, 0.0),
        ({"do_sample": True}, None), ({"top_k": 3}, None), ({"top_p": 0.5}, None),
        ({"typical_p": 0.5}, None), ({"temperature": 0.5}, 0.5),
        ({"do_sample": True, "temperature": 1.0}, 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_decoding_is_greedy_unless_a_parameter_asks_for_sampling(
    read: Any, parameters: dict[str, Any], temperature: float | None
) -> None:
    assert read(**parameters).sampling.temperature == temperature


def test_request_without_parameters_samples(make: MakeCall) -> None:
    request = TGI().decode_request(make("/generate", {"inputs": "a", "parameters": None}))

    assert isinstance(request, GenerationRequest)
    assert request.sampling.temperature is None


def test_parameters_have_their_fields(read: Any) -> None:
    request = read(
        max_new_tokens=5, stop=["x"], seed=3, repetition_penalty=1.1, frequency_penalty=0.5,
        truncate=7, watermark=True, adapter_id="lora",
    )  # fmt: skip

    assert request.stopping.max_tokens == 5
    assert (request.stopping.stop, request.stopping.include_stop) == (("x",), True)
    assert request.sampling.seed == 3
    assert request.sampling.repetition_penalty == 1.1
    assert request.sampling.frequency_penalty == 0.5
    assert request.stopping.truncate_prompt == 7
    assert request.sampling.watermark
    assert request.adapter == "lora"


def test_details_need_logprobs(read: Any) -> None:
    assert read().logprobs is None
    assert read(details=True).logprobs.top == 0
    assert read(top_n_tokens=2).logprobs.top == 2


def test_best_of_is_as_many_choices(read: Any) -> None:
    request = read(best_of=2, do_sample=True)

    assert (request.n, request.logprobs.top) == (2, 0)
    assert read(best_of=1).n is None


def test_unknown_fields_are_extra(make: MakeCall) -> None:
    body = {
        "inputs": "a",
        "parameters": {"foo": 1, "bar": None, "decoder_input_details": True},
        "options": {},
    }
    request: Any = TGI().decode_request(make("/generate", body))

    assert request.extra.keys() == {"options", "decoder_input_details"}
    assert request.field_extra == (ExtraFields("parameters", {("foo",): 1}, ("parameters",)),)


@pytest.mark.parametrize(
    ("path", "parameters", "text"),
    [
        ("/generate", {"best_of": 2, "seed": 1, "do_sample": True}, "`seed` must not be set"),
        ("/generate", {"best_of": 2}, "you must use sampling"),
        ("/generate_stream", {"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported"),
        ("/generate_stream", {"decoder_input_details": True}, "`decoder_input_details` == true"),
    ],
    ids=str,
)
def test_conflicts_are_rejected(
    read: Any, path: str, parameters: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameter, match=text):
        read(path, **parameters)


GRAMMARS = [
    ({"type": "json", "value": SCHEMA}, JsonSchemaFormat(RAW_SCHEMA)),
    ({"type": "json_object", "value": SCHEMA}, JsonSchemaFormat(RAW_SCHEMA)),
    ({"type": "json", "value": bytes(RAW_SCHEMA).decode()}, JsonSchemaFormat(RAW_SCHEMA)),
    ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
     JsonSchemaFormat(RAW_SCHEMA)),
    ({"type": "regex", "value": "[0-9]"}, RegexFormat("[0-9]")),
    ({"type": "json_object"}, JsonObjectFormat()),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "output"), GRAMMARS)
def test_grammar_is_an_output_format(read: Any, grammar: Any, output: Any) -> None:
    assert read(grammar=grammar).output == output


@pytest.mark.parametrize(
    "grammar",
    [
        {}, {"type": "json"}, {"type": "json", "value": {"type": "object"}},
        {"type": "json", "value": "{"}, {"type": "json", "value": 5},
        {"type": "json_schema", "value": {}}, {"type": "regex"}, {"type": "regex", "value": 5},
        {"type": "ebnf", "value": "x"}, "json",
    ],
    ids=str,
)  # fmt: skip
def test_other_grammars_are_rejected(read: Any, grammar: Any) -> None:
    with pytest.raises(InvalidParameter):
        read(grammar=grammar)


@pytest.mark.parametrize("body", [{}, {"inputs": 5}, {"inputs": ""}, {"inputs": "a", "model": 5}])
def test_invalid_bodies_are_rejected(make: MakeCall, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        TGI().decode_request(make("/generate", body))


def test_malformed_body_is_rejected(make: MakeCall) -> None:
    with pytest.raises(MalformedRequest):
        TGI().read_routing_info(make("/generate", b"{"))


@pytest.mark.parametrize(
    ("path", "body", "model", "stream"),
    [
        ("/generate", {"stream": True}, "m", False),
        ("/generate_stream", {}, "m", True),
        ("/", {}, "m", False),
        ("/", {"stream": True, "model": "tgi"}, "m", True),
        ("/tokenize", {"stream": True, "model": "other"}, "other", False),
        ("/v1/chat/completions", {"stream": True, "model": "dummy"}, "m", True),
    ],
    ids=str,
)
def test_routing_info_is_read_of_path_and_body(
    make: MakeCall, path: str, body: dict[str, Any], model: str, stream: bool
) -> None:
    info = TGI(model="m").read_routing_info(make(path, {"inputs": "a", **body}))

    assert (info.model, info.stream) == (model, stream)


# --- chat and completions -------------------------------------------------------------------------


def test_chat_takes_formats_in_both_notations(chat: Any) -> None:
    own = {"type": "json_object", "value": SCHEMA}
    others = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

    assert chat(response_format=own).output == JsonSchemaFormat(RAW_SCHEMA)
    assert chat(response_format=others).output == JsonSchemaFormat(RAW_SCHEMA, "x")
    assert chat(response_format={"type": "json_object"}).output == JsonObjectFormat()
    assert chat().output is None
    with pytest.raises(InvalidParameter):
        chat(response_format={"type": "regex"})


def test_chat_tool_choice_may_be_a_name(chat: Any) -> None:
    assert chat(tools=[TOOL], tool_choice="f").tool_choice == NamedTool("f")
    assert chat(tools=[TOOL], tool_choice="required").tool_choice == "required"
    assert chat(tools=[TOOL]).tool_choice is None


def test_chat_takes_no_grammar_beside_tools(chat: Any) -> None:
    with pytest.raises(InvalidParameter, match="mutually exclusive"):
        chat(tools=[TOOL], response_format={"type": "json", "value": SCHEMA})


def test_completion_has_no_limit_by_default(make: MakeCall) -> None:
    request = TGI(model="m").decode_request(make("/v1/completions", {"prompt": "a"}))

    assert isinstance(request, GenerationRequest)
    assert request.stopping.max_tokens is None


# --- embeddings -----------------------------------------------------------------------------------

VECTORS = ModelInfo("m", (), task="embedding")


def read_vectors(call: ClientRequest) -> EmbeddingRequest:
    request = TGI(model="m").decode_request(call, VECTORS)
    assert isinstance(request, EmbeddingRequest)
    return request


def test_inputs_of_an_embedding_model_become_vectors(make: MakeCall) -> None:
    body = {"inputs": ["a", "b"], "normalize": True, "truncate": True, "prompt_name": "x"}

    request = read_vectors(make("/", body))

    assert (request.inputs, request.normalize, request.overflow) == (("a", "b"), True, "truncate")
    assert request.extra.keys() == {"prompt_name"}
    assert read_vectors(make("/", {"inputs": "a", "truncate": False})).overflow == "error"
    assert read_vectors(make("/", {"inputs": "a"})).overflow is None


@pytest.mark.parametrize("inputs", [None, 5, [], [""], [5]], ids=str)
def test_other_inputs_of_an_embedding_model_are_rejected(make: MakeCall, inputs: Any) -> None:
    with pytest.raises(InvalidParameter):
        read_vectors(make("/", {"inputs": inputs}))
