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
from protocols.mindie.checks import MindieParamTable, list_params
from protocols.mindie.profiles import MindieConfig
from protocols.openai.messages import MessageStyle
from protocols.openai.profiles import WorkerProfile
from protocols.params import Param

MIN_TEMPERATURE: Final = 0.001
"""The temperature that stands for greedy, where 0 is refused."""
_MIN_POSITIVE = 1e-6
"""In place of a 0 that is refused: a nucleus of one token."""
_SEPARATE_FIELDS = ("stream", "priority", "timeout")
"""What is written otherwise."""
_MESSAGE_STYLE = MessageStyle(
    part_format="joined",
    empty_content="",
    role_mapping=(("developer", "system"), ("function", "tool")),
)
_SINGLE_CHOICE_PARAM: Final = Param(wire="n", field="n", type="int", low=1, high=1)
"""Passed over by a server that has no such field, and gives one answer anyway."""


class MindieCapabilities(Struct, frozen=True, kw_only=True):
    """A kind of server."""

    early: bool
    """See ``protocols.mindie.profiles.MindieProfile``."""
    text_params: params.ParamTable
    """The parameters of generate."""
    openai_profile: WorkerProfile
    """Of the endpoints in OpenAI's manner."""
    vllm_validator: bool
    """Conversations may name an output's form, and how long to think."""
    has_completions: bool
    """There is /v1/completions."""


def get_capabilities(setup: MindieConfig) -> MindieCapabilities:
    """What the server of this setup takes."""
    profile = setup.profile
    early = profile.early
    talk = list_worker_params(setup.chat_params)
    useless = ("watermark", *(("typical_p",) if early else ()))
    return MindieCapabilities(
        early=early,
        text_params=params.ParamTable(*list_worker_params(profile.text_params, useless=useless)),
        openai_profile=WorkerProfile(
            chat=(*talk, _SINGLE_CHOICE_PARAM) if early else talk,
            completion=list_worker_params(tables.COMPLETION_PARAMS),
            labels=(),
            message_style=_MESSAGE_STYLE,
            max_chat_logprobs=20,
            max_completion_logprobs=5,
            template_arguments=not early,
            beam_search=not early,
        ),
        vllm_validator=setup.vllm_validator and not early,
        has_completions=profile.has_completions,
    )


def list_worker_params(
    table: MindieParamTable, *, useless: Container[str] = ()
) -> tuple[Param, ...]:
    """The rows of a table that name a field of a request; ``useless`` ones change nothing there."""
    return tuple(
        _build_worker_param(param, dropped=param.wire in useless)
        for param in list_params(table)
        if param.wire not in _SEPARATE_FIELDS and not param.field.startswith(("asked.", "kept."))
    )


def _build_worker_param(param: Param, *, dropped: bool) -> Param:
    changes: dict[str, Any] = {"off": ()}
    if param.above_low:
        changes["low"] = MIN_TEMPERATURE if param.wire == "temperature" else _MIN_POSITIVE
    if dropped:
        changes["reason"] = "dropped"
    return replace(param, **changes)
