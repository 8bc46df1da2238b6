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

from gateway.core.ports import Call
from gateway.core.types import Templating
from protocols.mindie import tables
from protocols.mindie.checks import Table

MODEL: Final = re.compile(r"[A-Za-z0-9_.-]+")
"""What a path may call a model; any other path is none of the server's."""


Prompts = Literal["raw", "chat"]
TEMPLATINGS: Final[Mapping[Prompts, Templating]] = {
    "raw": Templating(mode="raw"),
    "chat": Templating(mode="server"),
}
RAW: Final = TEMPLATINGS["raw"]


class Profile(Struct, frozen=True, kw_only=True):
    """A release: what it takes, and how it answers."""

    name: str
    version: str
    """Of the server, as it names itself."""
    max_text_length: int
    """The longest text, in UTF-16 units."""
    text_params: Table = tables.TEXT
    chat_params: Table = tables.CHAT
    early: bool = False
    """The first releases: conversations of plain text, answered with a bare delta at the end, under
    finish reasons of their own; text that is greedy unless sampling is asked for; events without
    times; ids that may be anything."""
    has_completions: bool = False
    """A worker of this release has OpenAI's completions."""


PROFILES: Final[Mapping[str, Profile]] = {
    one.name: one
    for one in (
        Profile(name="2x", version="2.0.0", max_text_length=40 << 20, has_completions=True),
        Profile(name="1x", version="1.0.0", max_text_length=4 << 20),
        Profile(
            name="rc1",
            version="1.0.RC1",
            max_text_length=512 << 10,
            text_params=tables.TEXT_RC1,
            chat_params=tables.CHAT_RC1,
            early=True,
        ),
    )
}
"""The first is the default."""


class Setup(Struct, frozen=True, kw_only=True):
    """One server: its profile and settings, and the counter from which it names requests."""

    profile: Profile
    vllm_validator: bool = True
    """The server's ``openAiSupport``: conversations are checked after vLLM's rules."""
    default_model: str = ""
    """The model of the endpoints that name none."""
    templating: Templating = RAW
    """How text that is no conversation becomes the model's input."""
    max_iter_times: int | None = None
    """The most tokens that any answer has; None: no limit of ours."""
    request_counter: Iterator[int] = field(default_factory=itertools.count)

    @property
    def chat_params(self) -> Table:
        """The parameters of conversations."""
        later = not self.profile.early
        return tables.CHAT_PLAIN if later and not self.vllm_validator else self.profile.chat_params

    def get_request_id(self, call: Call) -> str:
        """A name for a request: the header's, or the next of the server's own."""
        return call.headers.get("req-id") or f"endpoint_common_{next(self.request_counter)}"
