"""The scripted workers, one row each. A new worker protocol has its rows in ``tests.protocols``."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Final

from tests.cross.workers.anthropic import Anthropic
from tests.cross.workers.databricks import Databricks
from tests.cross.workers.mindie import MindIE
from tests.cross.workers.openai import OpenAI
from tests.cross.workers.openai_responses import OpenAIResponses
from tests.cross.workers.ovms import OVMS
from tests.cross.workers.tgi import TGI
from tests.cross.workers.triton import Triton
from tests.cross.workers.worker import (
    CHATS,
    DROPPED,
    EMULATED,
    MODES,
    STREAMS,
    TEXTS,
    Worker,
    map_modes,
)
from tests.protocols import find_rows

_UNKNOWN_REASONS: Final = {"eos": "unknown", "length": "unknown"}
_APPROXIMATED_MESSAGES: Final = {"messages": "approximated"}
_MINDIE: Final = Worker(
    protocol="mindie",
    script=MindIE("2x"),
    profile="2x",
    include_stop_modes=CHATS,
    stop=map_modes(EMULATED, TEXTS),
    n=map_modes(EMULATED, TEXTS),
    without_usage=TEXTS,
    has_completions=True,
)

WORKERS: Final[Mapping[str, Worker]] = {
    **{
        name: Worker(
            protocol="openai",
            profile=name,
            script=OpenAI(name),
            include_stop_modes=include_stop_modes,
            names_stop=name in {"vllm", "sglang"},
            fingerprint_kinds=frozenset({"chat", "text"} if name in {"openai", "llamacpp"} else ()),
        )
        for name, include_stop_modes in (
            ("openai", ()),
            ("vllm", MODES),
            ("sglang", MODES),
            ("llamacpp", ()),
        )
    },
    "openai-responses": Worker(
        protocol="openai",
        fingerprint_kinds=frozenset({"text"}),
        options={"worker_api": "responses"},
        script=OpenAIResponses("openai"),
        stop=map_modes(EMULATED, CHATS),
        n=map_modes(EMULATED, CHATS),
    ),
    "openai-both": Worker(
        protocol="openai",
        profile="vllm",
        options={"worker_api": "both"},
        include_stop_modes=MODES,
        script=OpenAIResponses("vllm"),
        names_stop=True,
    ),
    "triton-vllm": Worker(
        protocol="triton",
        profile="vllm",
        script=Triton("vllm"),
        same_protocol_client="triton",
        include_stop_modes=MODES,
        conversation_losses=_APPROXIMATED_MESSAGES,
        n=map_modes(EMULATED, STREAMS),
        tools=DROPPED,
    ),
    "triton-trtllm": Worker(
        protocol="triton",
        profile="trtllm",
        script=Triton("trtllm"),
        conversation_losses=_APPROXIMATED_MESSAGES,
        requires_max_tokens=True,
        stop=map_modes(EMULATED),
        n=map_modes(EMULATED, STREAMS),
        logprobs=map_modes("approximated"),
        tools=DROPPED,
        reason_changes=_UNKNOWN_REASONS,
        without_end_mark=STREAMS,
    ),
    "triton-llmapi": Worker(
        protocol="triton",
        profile="llmapi",
        script=Triton("llmapi"),
        conversation_losses=_APPROXIMATED_MESSAGES,
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED),
        tools=DROPPED,
        without_usage=MODES,
    ),
    "triton-plain": Worker(
        protocol="triton",
        profile="plain",
        script=Triton("plain"),
        conversation_losses=_APPROXIMATED_MESSAGES,
        stop=map_modes(EMULATED),
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED),
        tools=DROPPED,
        reason_changes=_UNKNOWN_REASONS,
        without_usage=MODES,
        without_end_mark=STREAMS,
    ),
    "mindie-2x": _MINDIE,
    "mindie-1x": Worker(
        protocol="mindie",
        profile="1x",
        script=MindIE("1x"),
        include_stop_modes=CHATS,
        stop=map_modes(EMULATED, TEXTS),
        n=map_modes(EMULATED, TEXTS),
        logprobs=map_modes(DROPPED, TEXTS),
        without_usage=TEXTS,
    ),
    "mindie-rc1": Worker(
        protocol="mindie",
        profile="rc1",
        script=MindIE("rc1"),
        stop=map_modes(EMULATED),
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED),
        tools=DROPPED,
        without_usage=("chat stream", *TEXTS),
    ),
    "ovms-2026": Worker(
        protocol="ovms",
        profile="2026",
        script=OVMS("2026"),
        include_stop_modes=MODES,
        stop=map_modes(EMULATED, STREAMS),
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED, STREAMS),
    ),
    "ovms-2024": Worker(
        protocol="ovms",
        profile="2024",
        script=OVMS("2024"),
        stop=map_modes(EMULATED),
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED),
        tools=DROPPED,
        reason_changes={"length": "eos"},
        without_usage=MODES,
    ),
    "databricks": Worker(
        protocol="databricks",
        script=Databricks(),
        n=map_modes(EMULATED, TEXTS),
        logprobs=map_modes(DROPPED, TEXTS),
    ),
    "anthropic": Worker(
        protocol="anthropic",
        script=Anthropic(),
        n=map_modes(EMULATED),
        logprobs=map_modes(DROPPED),
        names_stop=True,
        requires_max_tokens=True,
        prompt_loss="approximated",
    ),
    "tgi": Worker(
        protocol="tgi",
        fingerprint_kinds=frozenset({"chat"}),
        script=TGI(),
        model_in_url=True,
        stop=map_modes(EMULATED),
        n=map_modes(EMULATED),
    ),
    **ChainMap(*find_rows("CROSS_WORKERS").values()),
}
