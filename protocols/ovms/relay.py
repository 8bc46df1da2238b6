"""A client's own bytes for a server of the same release. See ``protocols.openai.relay``.

What is looked at together with something else (beams, and how many answers they give) goes the long
way; so do tokens that the early release counts on its own when it may not stop.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from protocols.openai import faults
from protocols.openai.passage import reader
from protocols.openai.relay import (
    ENCODINGS,
    FLAG,
    LABEL,
    MESSAGES,
    OPTIONS,
    PLAIN_MESSAGES,
    TOOLS,
    Form,
    Relays,
)
from protocols.openai.worker import Writer
from protocols.ovms import tables
from protocols.ovms.profiles import PROFILES
from protocols.ovms.requests import MOST_INPUTS
from protocols.ovms.worker import meaning

_ROOT: Final = "/v3"
_OURS: Final = frozenset({"best_of", "n", "echo"})
_EARLY_OURS: Final = _OURS | {"ignore_eos"}
_TEXT = Annotated[str, Meta(min_length=1)]
_INPUTS: Final = _TEXT | Annotated[list[_TEXT], Meta(min_length=1, max_length=MOST_INPUTS)]
_STREAM: Final = (("Content-Type", "text/event-stream"),)

_BOTH: Final[Mapping[str, Any]] = {"stream": FLAG, "user": LABEL}
_CHAT: Final = {
    **_BOTH,
    **TOOLS,
    "messages": MESSAGES,
    "stream_options": OPTIONS,
    "logprobs": FLAG,
}
_COMPLETION: Final = {
    **_BOTH,
    "prompt": _TEXT,
    "stream_options": OPTIONS,
    "logprobs": Literal[1] | UnsetType,
}
_EARLY_CHAT: Final = {**_BOTH, "messages": PLAIN_MESSAGES}
_EARLY_COMPLETION: Final = {**_BOTH, "prompt": _TEXT}


def relays(release: str) -> Relays:
    """For the servers of one release."""
    early, profile = release == "2024", PROFILES[release]
    rows = tables.EARLY_TABLES if early else tables.TABLES
    form = partial(
        Form,
        gateway_fields=_EARLY_OURS if early else _OURS,
        forwards_field=Writer(profile, _ROOT, powers=False).forwards_field,
        is_valid_body=_fits,
    )
    return Relays(
        {
            "chat": form(
                path=f"{_ROOT}/chat/completions",
                field_types=_EARLY_CHAT if early else _CHAT,
                worker_params=profile.chat,
                client_params=rows["chat"],
            ),
            "completion": form(
                path=f"{_ROOT}/completions",
                field_types=_EARLY_COMPLETION if early else _COMPLETION,
                worker_params=profile.completion,
                client_params=rows["completion"],
            ),
            "embedding": form(
                path=f"{_ROOT}/embeddings",
                field_types={"input": _INPUTS, "encoding_format": ENCODINGS, "user": LABEL},
                worker_params=(),
                client_params=(),
            ),
        },
        read=partial(reader, complaint=partial(faults.complain, judge=meaning)),
        stream=_STREAM,
    )


def _fits(body: Any, said: AbstractSet[str]) -> bool:
    """A stream has no log probabilities, and keeps its stop strings."""
    del said
    if getattr(body, "stream", False) is not True:
        return True
    kept = getattr(body, "include_stop_str_in_output", True) is not False
    return kept and not getattr(body, "logprobs", UNSET)
