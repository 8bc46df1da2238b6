"""A form that sends a prompt names the parameters of the protocol's own table."""

import importlib

from protocols import PROTOCOLS
from protocols.chat.params import CHAT_PARAMS
from protocols.core.interfaces import OpenApiProvider
from protocols.params import Param
from protocols.prompt_form import EXTENSION, find_parameters


def test_parameters_are_those_of_the_table_below_their_parent() -> None:
    table = [
        Param("max_new_tokens", "stopping.max_tokens", "int"),
        Param("p", "sampling.top_p", "float"),
        Param("top_k", "sampling.top_k", "int"),
    ]

    assert find_parameters(table, "parameters.") == {
        "max_tokens": "parameters.max_new_tokens",
        "top_p": "parameters.p",
    }


def test_of_two_names_of_a_parameter_that_of_the_form_is_taken() -> None:
    table = [Param("max_completion_tokens", "stopping.max_tokens", "int"), *CHAT_PARAMS]

    assert find_parameters(table)["max_tokens"] == "max_tokens"


def test_every_protocol_has_a_form() -> None:
    for name, location in PROTOCOLS.items():
        module, _, attribute = location.partition(":")
        adapter = getattr(importlib.import_module(module), attribute)()
        assert isinstance(adapter, OpenApiProvider)
        forms = [
            operation[EXTENSION]
            for operation in adapter.openapi_fragment().operations.values()
            if EXTENSION in operation
        ]
        assert (name, bool(forms)) == (name, True)
        for form in forms:
            assert {"max_tokens", "temperature", "top_p"} <= form["parameters"].keys()
