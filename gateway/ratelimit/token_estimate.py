"""An estimate of a request's tokens from its bytes, without decoding them."""

import re
from typing import Final

from protocols.core.catalog import ModelInfo

BYTES_PER_TOKEN: Final = 4
"""For JSON in English; other languages and escapes have more bytes per token."""
MAX_ESTIMATED_PROMPT: Final = 32_768
"""In tokens, if the model's context length is unknown: the bytes of an image are no prompt."""
DEFAULT_COMPLETION_TOKENS: Final = 256
"""In tokens, if neither the client nor the model limits the response's length."""
_MAX_TOKENS_PATTERN: Final = re.compile(
    rb'"max_(?:[a-z]{1,10}_)?tokens"\s{0,9}:\s{0,9}([0-9]{1,9})'
)
"""Every protocol has a field of such a name. Quotes inside a string are escaped, so none matches.
"""


def estimate_tokens(body: bytes, model: ModelInfo) -> tuple[int, int]:
    """The estimated tokens of the prompt and of the response."""
    prompt, longest = len(body) // BYTES_PER_TOKEN, model.context_length or MAX_ESTIMATED_PROMPT
    if prompt > longest:  # noqa: PLR1730 - it would be a call for each request
        prompt = longest
    if model.task != "chat":
        return prompt, 0
    start = body.find(b'"max_')  # faster than the search for the whole pattern
    match = _MAX_TOKENS_PATTERN.search(body, start) if start >= 0 else None
    return prompt, (model.max_tokens or DEFAULT_COMPLETION_TOKENS) if match is None else int(
        match[1]
    )
