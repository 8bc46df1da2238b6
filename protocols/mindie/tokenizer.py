"""/v1/tokenizer: the tokens of a text, counted and, unless that is declined, shown.

Source: MindIE-LLM 0695772, http_handler.cpp (HandleTokenizer) and infer_tokenizer.cpp (TikToken).
"""

from collections.abc import Sequence

from gateway.core.ports import Call, Reply, Token
from protocols.mindie.checks import body, get, wrong
from protocols.mindie.profiles import Setup
from protocols.mindie.requests import too_long
from protocols.mindie.texts import encode, reply


def read(call: Call, setup: Setup) -> str:
    """The text. Raises InvalidParameter or Malformed."""
    got = get(body(call), "inputs")
    if not isinstance(got, str):
        raise wrong("Inputs in request body is invalid.", "inputs", "type")
    limit = setup.profile.max_text_length
    if (length := too_long(got, limit)) is not None:
        text = f"Inputs data length in [0, {limit}], but the length of inputs is {length}"
        raise wrong(text, "inputs", "too_long" if length else "empty")
    return got


def told(call: Call, tokens: Sequence[Token]) -> Reply:
    """The answer. A token without text (a special one, a part of a character) is only counted."""
    shown = get(body(call), "do_decode") is not False
    texts = [text for _, text in tokens if shown and text]
    return reply(encode({"token_number": len(tokens), "tokens": texts}))
