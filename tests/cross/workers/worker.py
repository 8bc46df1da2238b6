"""A scripted worker: the pool's settings and what clients may expect."""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from tests.cross.worker_server import WorkerScript

Mode = Literal["chat", "chat stream", "text", "text stream"]
MODES: Final[tuple[Mode, ...]] = ("chat", "chat stream", "text", "text stream")
STREAMS: Final = ("chat stream", "text stream")
CHATS: Final = ("chat", "chat stream")
TEXTS: Final = ("text", "text stream")
Losses = frozenset[tuple[str, str]]
"""Paths of the internal request, each with the kind of its loss."""
NO_LOSSES: Final[Losses] = frozenset()
EMULATED: Final = "emulated"
DROPPED: Final = "dropped"


def map_modes(one: str, modes: tuple[str, ...] = MODES, **others: str) -> dict[str, str]:
    """Map these modes to one loss; ``others`` are single modes, with ``_`` for a blank."""
    return {
        **dict.fromkeys(modes, one),
        **{mode.replace("_", " "): it for mode, it in others.items()},
    }


class Worker(Struct, frozen=True, kw_only=True):
    """One row. The mappings are by mode; a mode without entry has no loss."""

    protocol: str
    script: WorkerScript
    profile: str | None = None
    options: Mapping[str, str] = {}
    """Further options of the pool's protocol."""
    fingerprint_kinds: frozenset[str] = frozenset()
    """The kinds of requests whose responses have a ``system_fingerprint``."""
    model_in_url: bool = False
    """Requests name no model, so each scenario has a URL of its own."""
    same_protocol_client: str = ""
    """The client whose requests and responses are passed through unchanged."""
    passthrough_client: str = ""
    """The client of the same protocol, for which the worker's finish reasons say enough."""
    conversation_losses: Mapping[str, str] = {}
    """The losses of every conversation, by path."""
    stop: Mapping[str, str] = {}
    names_stop: bool = False
    """It names the stop string that matched."""
    include_stop_modes: tuple[str, ...] = ()
    """The modes in which a stop string can stay, or always stays, in the text."""
    n: Mapping[str, str] = {}
    logprobs: Mapping[str, str] = {}
    alternatives: str = ""
    """The loss of the alternatives to each token, where its probabilities are none."""
    tools: str = ""
    prompt_loss: str = ""
    """The loss of a prompt that is no conversation."""
    requires_max_tokens: bool = False
    """It rejects requests without max_tokens."""
    reason_changes: Mapping[str, str] = {}
    """Finish reasons that the client sees as others."""
    without_usage: tuple[str, ...] = ()
    """The modes without usage."""
    has_completions: bool = False
    """Requests with logprobs use its completions, which also support stop and usage."""
    without_end_mark: tuple[str, ...] = ()
    """The modes in which a stream has no end mark."""

    def loss(self, path: str, reason: str | None) -> Losses:
        """Return the loss of one field, or none."""
        return frozenset({(path, reason)}) if reason else NO_LOSSES

    def list_expected_losses(self, kind: str, *, limited: bool) -> Losses:
        """Return the losses of every request; ``limited``: the client sends max_tokens."""
        losses = set(self.conversation_losses.items()) if kind == "chat" else set()
        if self.prompt_loss and kind == "text":
            losses.add(("messages", self.prompt_loss))
        if self.requires_max_tokens and not limited:
            losses.add(("stopping.max_tokens", "defaulted"))
        return frozenset(losses)
