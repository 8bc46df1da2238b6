"""/v1/tokenizer: the tokens of a text, counted and, unless that is declined, shown.

Source: MindIE-LLM 0695772, http_handler.cpp (HandleTokenizer) and infer_tokenizer.cpp (TikToken).
"""

from collections.abc import Sequence

from protocols.core.interfaces import ClientRequest, HttpResponse, Token
from protocols.mindie.checks import build_param_error, get_field, read_body_fields
from protocols.mindie.profiles import MindieConfig
from protocols.mindie.requests import get_invalid_length
from protocols.mindie.texts import build_json_response, encode_json


def read_tokenizer_text(call: ClientRequest, setup: MindieConfig) -> str:
    """The text. Raises InvalidParameter or Malformed."""
    got = get_field(read_body_fields(call), "inputs")
    if not isinstance(got, str):
        raise build_param_error("Inputs in request body is invalid.", "inputs", "type")
    limit = setup.profile.max_text_length
    if (length := get_invalid_length(got, limit)) is not None:
        text = f"Inputs data length in [0, {limit}], but the length of inputs is {length}"
        raise build_param_error(text, "inputs", "too_long" if length else "empty")
    return got


def build_tokenizer_response(call: ClientRequest, tokens: Sequence[Token]) -> HttpResponse:
    """The answer. A token without text (a special one, a part of a character) is only counted."""
    shown = get_field(read_body_fields(call), "do_decode") is not False
    texts = [text for _, text in tokens if shown and text]
    return build_json_response(encode_json({"token_number": len(tokens), "tokens": texts}))
