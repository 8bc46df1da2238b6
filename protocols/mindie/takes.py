"""What a server takes of the gateway: the tables of its endpoints, as they are written.

A worker's row gives the range that the worker takes: what lies outside is clamped, and reported.

Sources: those of ``protocols.mindie.tables``; MindIE-LLM 0695772, samplers (nobody there looks at a
watermark); for 1.0.RC1 the published page of generate_stream, after which neither a watermark nor
``typical_p`` comes to anything, and a temperature below 0.001 spoils the text.
"""

from collections.abc import Container
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from protocols import params
from protocols.mindie import tables
from protocols.mindie.checks import Table, rows
from protocols.mindie.profiles import Setup
from protocols.openai.messages import Writing
from protocols.openai.profiles import Profile
from protocols.params import Param

COLDEST: Final = 0.001
"""The temperature that stands for greedy, where 0 is refused."""
_LEAST = 1e-6
"""In place of a 0 that is refused: a nucleus of one token."""
_APART = ("stream", "priority", "timeout")
"""What is written otherwise."""
_WRITING = Writing(
    part_format="joined",
    empty_content="",
    role_mapping=(("developer", "system"), ("function", "tool")),
)
_ONE: Final = Param(wire="n", field="n", type="int", low=1, high=1)
"""Passed over by a server that has no such field, and gives one answer anyway."""


class Takes(Struct, frozen=True, kw_only=True):
    """A kind of server."""

    early: bool
    """See ``protocols.mindie.profiles.Profile``."""
    text_params: params.Table
    """The parameters of generate."""
    openai_profile: Profile
    """Of the endpoints in OpenAI's manner."""
    vllm_validator: bool
    """Conversations may name an output's form, and how long to think."""
    has_completions: bool
    """There is /v1/completions."""


def takes(setup: Setup) -> Takes:
    """What the server of this setup takes."""
    profile = setup.profile
    early = profile.early
    talk = written(setup.chat_params)
    useless = ("watermark", *(("typical_p",) if early else ()))
    return Takes(
        early=early,
        text_params=params.Table(*written(profile.text_params, useless=useless)),
        openai_profile=Profile(
            chat=(*talk, _ONE) if early else talk,
            completion=written(tables.COMPLETION),
            labels=(),
            message_style=_WRITING,
            max_chat_logprobs=20,
            max_completion_logprobs=5,
            template_arguments=not early,
            beam_search=not early,
        ),
        vllm_validator=setup.vllm_validator and not early,
        has_completions=profile.has_completions,
    )


def written(table: Table, *, useless: Container[str] = ()) -> tuple[Param, ...]:
    """The rows of a table that name a field of a request; ``useless`` ones change nothing there."""
    return tuple(
        _row(param, dropped=param.wire in useless)
        for param in rows(table)
        if param.wire not in _APART and not param.field.startswith(("asked.", "kept."))
    )


def _row(param: Param, *, dropped: bool) -> Param:
    changes: dict[str, Any] = {"off": ()}
    if param.above_low:
        changes["low"] = COLDEST if param.wire == "temperature" else _LEAST
    if dropped:
        changes["reason"] = "dropped"
    return replace(param, **changes)
