"""The workers, one row each: who they are, and what a client may expect of them.

Adding a worker protocol costs one module and one row.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from tests.cross.worker_server import WorkerScript
from tests.cross.workers.anthropic import Anthropic
from tests.cross.workers.databricks import Databricks
from tests.cross.workers.mindie import MindIE
from tests.cross.workers.openai import OpenAI
from tests.cross.workers.openai_responses import OpenAIResponses
from tests.cross.workers.ovms import OVMS
from tests.cross.workers.tgi import TGI
from tests.cross.workers.triton import Triton

Way = Literal["chat", "chat stream", "text", "text stream"]
WAYS: Final[tuple[Way, ...]] = ("chat", "chat stream", "text", "text stream")
STREAMS: Final = ("chat stream", "text stream")
CHATS: Final = ("chat", "chat stream")
TEXTS: Final = ("text", "text stream")
Losses = frozenset[tuple[str, str]]
"""Paths of the internal request, and what became of them."""
NONE: Final[Losses] = frozenset()
EMULATED: Final = "emulated"
LOST: Final = "dropped"


def map_ways(one: str, ways: tuple[str, ...] = WAYS, **others: str) -> dict[str, str]:
    """The same for these ways; ``others`` name one way each, a blank in it as ``_``."""
    return {**dict.fromkeys(ways, one), **{way.replace("_", " "): it for way, it in others.items()}}


class Worker(Struct, frozen=True, kw_only=True):
    """One row. The mappings are by way; a way that is not among them is carried without loss."""

    protocol: str
    script: WorkerScript
    profile: str | None = None
    options: Mapping[str, str] = {}
    """The protocol's further options of its pool."""
    apart: bool = False
    """Its requests name no model: each play has a URL of its own."""
    same_protocol_client: str = ""
    """The client whose calls are passed on as they are, and which hears this worker's own words."""
    always: Mapping[str, str] = {}
    """What is lost of each conversation, by path."""
    stop: Mapping[str, str] = {}
    names_stop: bool = False
    """It says which stop string matched."""
    keeps: tuple[str, ...] = ()
    """The ways in which it can be told to leave a stop string in the text, or always does."""
    n: Mapping[str, str] = {}
    logprobs: Mapping[str, str] = {}
    tools: str = ""
    prompts: str = ""
    """What is lost of a prompt that is no conversation."""
    insists: bool = False
    """It must be told how long an answer may be."""
    ends: Mapping[str, str] = {}
    """What its finish reasons come to, where that is not what they mean."""
    silent: tuple[str, ...] = ()
    """The ways in which it does not tell usage."""
    has_completions: bool = False
    """Questions for logprobs go to its completions, which also stop, and tell usage."""
    endless: tuple[str, ...] = ()
    """The ways in which a stream has no mark of its end."""

    def loss(self, path: str, reason: str | None) -> Losses:
        """What is lost of one field, if anything is."""
        return frozenset({(path, reason)}) if reason else NONE

    def list_expected_losses(self, kind: str, *, limited: bool) -> Losses:
        """What is lost of every question; ``limited``: the client said how long."""
        losses = set(self.always.items()) if kind == "chat" else set()
        if self.prompts and kind == "text":
            losses.add(("messages", self.prompts))
        if self.insists and not limited:
            losses.add(("stopping.max_tokens", "defaulted"))
        return frozenset(losses)


_UNTOLD: Final = {"eos": "unknown", "length": "unknown"}
_RENDERED: Final = {"messages": "approximated"}
_MINDIE: Final = Worker(
    protocol="mindie",
    script=MindIE("2x"),
    profile="2x",
    keeps=CHATS,
    stop=map_ways(EMULATED, TEXTS),
    n=map_ways(EMULATED, TEXTS),
    silent=TEXTS,
    has_completions=True,
)

WORKERS: Final[Mapping[str, Worker]] = {
    **{
        name: Worker(
            protocol="openai",
            profile=name,
            script=OpenAI(name),
            keeps=keeps,
            names_stop=name in {"vllm", "sglang"},
        )
        for name, keeps in (("openai", ()), ("vllm", WAYS), ("sglang", WAYS), ("llamacpp", ()))
    },
    "openai-responses": Worker(
        protocol="openai",
        options={"worker_api": "responses"},
        script=OpenAIResponses("openai"),
        stop=map_ways(EMULATED, CHATS),
        n=map_ways(EMULATED, CHATS),
    ),
    "openai-both": Worker(
        protocol="openai",
        profile="vllm",
        options={"worker_api": "both"},
        keeps=WAYS,
        script=OpenAIResponses("vllm"),
        names_stop=True,
    ),
    "triton-vllm": Worker(
        protocol="triton",
        profile="vllm",
        script=Triton("vllm"),
        same_protocol_client="triton",
        keeps=WAYS,
        always=_RENDERED,
        n=map_ways(EMULATED, STREAMS),
        tools=LOST,
    ),
    "triton-trtllm": Worker(
        protocol="triton",
        profile="trtllm",
        script=Triton("trtllm"),
        always=_RENDERED,
        insists=True,
        stop=map_ways(EMULATED),
        n=map_ways(EMULATED, STREAMS),
        logprobs=map_ways("approximated"),
        tools=LOST,
        ends=_UNTOLD,
        endless=STREAMS,
    ),
    "triton-llmapi": Worker(
        protocol="triton",
        profile="llmapi",
        script=Triton("llmapi"),
        always=_RENDERED,
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST),
        tools=LOST,
        silent=WAYS,
    ),
    "triton-plain": Worker(
        protocol="triton",
        profile="plain",
        script=Triton("plain"),
        always=_RENDERED,
        stop=map_ways(EMULATED),
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST),
        tools=LOST,
        ends=_UNTOLD,
        silent=WAYS,
        endless=STREAMS,
    ),
    "mindie-2x": _MINDIE,
    "mindie-1x": Worker(
        protocol="mindie",
        profile="1x",
        script=MindIE("1x"),
        keeps=CHATS,
        stop=map_ways(EMULATED, TEXTS),
        n=map_ways(EMULATED, TEXTS),
        logprobs=map_ways(LOST, TEXTS),
        silent=TEXTS,
    ),
    "mindie-rc1": Worker(
        protocol="mindie",
        profile="rc1",
        script=MindIE("rc1"),
        stop=map_ways(EMULATED),
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST),
        tools=LOST,
        silent=("chat stream", *TEXTS),
    ),
    "ovms-2026": Worker(
        protocol="ovms",
        profile="2026",
        script=OVMS("2026"),
        keeps=WAYS,
        stop=map_ways(EMULATED, STREAMS),
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST, STREAMS),
    ),
    "ovms-2024": Worker(
        protocol="ovms",
        profile="2024",
        script=OVMS("2024"),
        stop=map_ways(EMULATED),
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST),
        tools=LOST,
        ends={"length": "eos"},
        silent=WAYS,
    ),
    "databricks": Worker(
        protocol="databricks",
        script=Databricks(),
        n=map_ways(EMULATED, TEXTS),
        logprobs=map_ways(LOST, TEXTS),
    ),
    "anthropic": Worker(
        protocol="anthropic",
        script=Anthropic(),
        n=map_ways(EMULATED),
        logprobs=map_ways(LOST),
        names_stop=True,
        insists=True,
        prompts="approximated",
    ),
    "tgi": Worker(
        protocol="tgi", script=TGI(), apart=True, stop=map_ways(EMULATED), n=map_ways(EMULATED)
    ),
}
