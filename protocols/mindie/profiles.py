"""The releases that clients know, and what the rest of the package is told of one server.

``2x``   MindIE-LLM 0695772, May 2026, in source
``1x``   the published pages of 1.0.RC3 and 1.0.0
``rc1``  the published pages of 1.0.RC1 and 1.0.RC2
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from msgspec import Struct, field

from protocols.core.interfaces import ClientRequest
from protocols.core.request import PromptOptions
from protocols.mindie import tables
from protocols.mindie.checks import MindieParamTable

MODEL_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_.-]+")
"""What a path may call a model; any other path is none of the server's."""


PromptMode = Literal["raw", "chat"]
PROMPT_OPTIONS_BY_MODE: Final[Mapping[PromptMode, PromptOptions]] = {
    "raw": PromptOptions(mode="raw"),
    "chat": PromptOptions(mode="server"),
}
RAW_PROMPT_OPTIONS: Final = PROMPT_OPTIONS_BY_MODE["raw"]


class MindieProfile(Struct, frozen=True, kw_only=True):
    """A release: what it takes, and how it answers."""

    name: str
    version: str
    """Of the server, as it names itself."""
    max_text_length: int
    """The longest text, in UTF-16 units."""
    text_params: MindieParamTable = tables.TEXT_PARAMS
    chat_params: MindieParamTable = tables.CHAT_PARAMS
    early: bool = False
    """The first releases: conversations of plain text, answered with a bare delta at the end, under
    finish reasons of their own; text that is greedy unless sampling is asked for; events without
    times; ids that may be anything."""
    has_completions: bool = False
    """A worker of this release has OpenAI's completions."""


PROFILES: Final[Mapping[str, MindieProfile]] = {
    one.name: one
    for one in (
        MindieProfile(name="2x", version="2.0.0", max_text_length=40 << 20, has_completions=True),
        MindieProfile(name="1x", version="1.0.0", max_text_length=4 << 20),
        MindieProfile(
            name="rc1",
            version="1.0.RC1",
            max_text_length=512 << 10,
            text_params=tables.TEXT_PARAMS_RC1,
            chat_params=tables.CHAT_PARAMS_RC1,
            early=True,
        ),
    )
}
"""The first is the default."""


class MindieConfig(Struct, frozen=True, kw_only=True):
    """One server: its profile and settings, and the counter from which it names requests."""

    profile: MindieProfile
    vllm_validator: bool = True
    """The server's ``openAiSupport``: conversations are checked after vLLM's rules."""
    default_model: str = ""
    """The model of the endpoints that name none."""
    templating: PromptOptions = RAW_PROMPT_OPTIONS
    """How text that is no conversation becomes the model's input."""
    max_iter_times: int | None = None
    """The most tokens that any answer has; None: no limit of ours."""
    request_counter: Iterator[int] = field(default_factory=itertools.count)

    @property
    def chat_params(self) -> MindieParamTable:
        """The parameters of conversations."""
        later = not self.profile.early
        return (
            tables.CHAT_PARAMS_SERVER_VALIDATOR
            if later and not self.vllm_validator
            else self.profile.chat_params
        )

    def get_request_id(self, call: ClientRequest) -> str:
        """A name for a request: the header's, or the next of the server's own."""
        return call.headers.get("req-id") or f"endpoint_common_{next(self.request_counter)}"
