"""Token counts and other numbers that workers report. They are checked before they are used."""

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from protocols.core.events import Event, StreamEnd, Usage
from protocols.core.request import (
    EmbeddingRequest,
    ReasoningPart,
    Request,
    TextPart,
    TokenizeRequest,
)

MAX_TOKENS: Final = 1 << 24
"""More tokens than the context of any model, for each prompt and each choice."""
MAX_TIMESTAMP: Final = 1 << 40
"""A Unix time in seconds, far in the future."""
IMAGE_TOKENS: Final = 1500
"""The estimated tokens of an image, and of any other part that is no text."""
_BYTES_PER_TOKEN: Final = 4


def estimate_prompt_tokens(request: TokenizeRequest) -> int:
    """The estimated tokens of a conversation and its tools; at least 1."""
    size, parts = 0, 0
    for message in request.messages:
        size += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for part in message.parts:
            if isinstance(part, TextPart | ReasoningPart):
                size += len(part.text.encode())
            else:
                parts += 1
    for tool in request.tools:
        size += len(tool.name) + len(tool.description or "") + len(tool.parameters or b"")
    return max(-(-size // _BYTES_PER_TOKEN) + parts * IMAGE_TOKENS, 1)


def read_integer(value: Any, maximum: int) -> int | None:
    """The value if it is an integer from 0 to ``maximum``."""
    return value if type(value) is int and 0 <= value <= maximum else None


def has_implausible_counts(usage: Any, request: Request) -> bool:
    """Whether a worker's usage is no object, or has a count that no such request can have."""
    if not isinstance(usage, dict):
        return True
    maximum = request.context_length or MAX_TOKENS
    return any(
        has_implausible_counts(value, request)
        if isinstance(value, dict)
        else name.endswith("_tokens") and value is not None and read_integer(value, maximum) is None
        for name, value in usage.items()
    )


class UsageReader(Struct, eq=False):
    """Checks the token counts of one response.

    A count is plausible if it is an integer from 0 to the model's context length, or to
    ``MAX_TOKENS`` if that is unknown, for each prompt or choice. After an implausible count, the
    usage is ignored (``has_ignored``), and the gateway counts instead.
    """

    _request: Request
    has_ignored: bool = False
    """Whether a count was implausible."""

    def read_usage(
        self, prompt: Any, completion: Any, cached: Any = None, reasoning: Any = None
    ) -> Usage | None:
        """The usage; None if one of the first two is missing, or any is implausible."""
        if prompt is completion is cached is reasoning is None:
            return None
        maximum = self._request.context_length or MAX_TOKENS
        if (
            type(prompt) is type(completion) is int
            and 0 <= prompt <= maximum
            and 0 <= completion <= maximum
            and cached is reasoning is None
            and not self.has_ignored
        ):
            return Usage(prompt, completion)  # as nearly all responses report it
        usage = (
            self.read_prompt_tokens(prompt),
            self.read_completion_tokens(completion),
            self.read_prompt_tokens(cached),
            self.read_completion_tokens(reasoning),
        )
        if self.has_ignored or usage[0] is None or usage[1] is None:
            return None
        return Usage(usage[0], usage[1], usage[2], usage[3])

    def read_prompt_tokens(self, value: Any) -> int | None:
        """The number of tokens of all prompts; None if it is missing or implausible."""
        if value is None:
            return None
        request = self._request
        prompts = request.inputs if isinstance(request, EmbeddingRequest) else request.prompts
        return self._read_count(value, len(prompts))

    def read_completion_tokens(self, value: Any) -> int | None:
        """The number of tokens of all choices; None if it is missing or implausible."""
        request = self._request
        if isinstance(request, EmbeddingRequest):
            return self._read_count(value, 1)
        return self._read_count(value, request.choice_count * (request.best_of or 1))

    def add_completion_tokens(self, total: int | None, counts: Iterable[Any]) -> int | None:
        """``total`` and these counts together; None if any count was implausible."""
        for value in counts:
            count = self.read_completion_tokens(value)
            total = self.read_completion_tokens((total or 0) + (count or 0))
        return None if self.has_ignored else total

    def build_end(self, usage: Usage | None = None) -> list[Event]:
        """The last events of the response."""
        if usage is None or self.has_ignored:
            return [StreamEnd(self.has_ignored)]
        return [usage, StreamEnd()]

    def _read_count(self, value: Any, item_count: int) -> int | None:
        if value is None:
            return None
        maximum = (self._request.context_length or MAX_TOKENS) * (item_count or 1)
        count = read_integer(value, maximum)
        if count is None:
            self.has_ignored = True
        return count
