"""The loads: kinds of requests, number of clients, pace and duration."""

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from tests.bench.responses import STYLES

Form = Literal["unary", "stream"]
Kind = Literal["mixed", "repeated", "images", "embeddings"]


def make_model_names(count: int) -> tuple[str, ...]:
    """Make names of models whose workers respond in each style in turn."""
    return tuple(
        f"{STYLES[number % len(STYLES)]}-{number // len(STYLES)}" for number in range(count)
    )


def make_keys(count: int) -> tuple[str, ...]:
    """Make API keys."""
    return tuple(f"sk-bench-{number}-0123456789abcdef" for number in range(count))


MODELS: Final = make_model_names(20)
KEYS: Final = make_keys(5)
MANY: Final = 1_000
"""The number of models and keys in the loads with many of them."""
OPENAI_PAIR: Final = "OpenAI to OpenAI"
TO_TRITON_PAIR: Final = "OpenAI to Triton"
FROM_TRITON_PAIR: Final = "Triton to OpenAI"
FROM_MINDIE_PAIR: Final = "MindIE to OpenAI"
BASELINE: Final = "nginx"
MANY_MODELS: Final = "interlingua, 1,000 models and keys"


class Traffic(Struct, frozen=True, kw_only=True):
    """The requests of a load.

    ``mixed``: distinct chat completions (or requests of another generating endpoint). ``repeated``:
    the same bytes each time. ``images``: chat completions with base64 images. ``embeddings``: of 1
    to 2,000 texts. ``size`` is the approximate size of a body in repeated requests and those with
    images; others vary. ``tools`` and ``logprobs`` are the shares of mixed requests with tools and
    with log probabilities. Keys and models alternate.
    """

    kind: Kind = "mixed"
    size: int = 650
    models: tuple[str, ...] = MODELS
    keys: int = len(KEYS)
    tools: float = 0.1
    logprobs: float = 0.1


class Load(Struct, frozen=True, kw_only=True):
    """``pace`` is in microseconds between tokens; 0 sends a stream's tokens all at once.

    Requests are started for ``seconds``, at most ``count``. ``rate`` is in requests per second,
    independent of responses (an open loop); with 0, each client sends a request after its last
    response. ``pairs`` and ``gateways`` name the protocol pairs and gateways that get the load;
    None: all that can. ``rounds`` is the maximum number of rounds with it.
    """

    name: str
    form: Form = "unary"
    clients: int = 32
    count: int = 20_000
    seconds: float = 2.0
    pace: int = 0
    rate: int = 0
    traffic: Traffic = Traffic()
    tls: bool = False
    pairs: frozenset[str] | None = None
    gateways: frozenset[str] | None = None
    rounds: int = 9

    @property
    def unit(self) -> Literal["request", "token", "stream"]:
        """What the CPU time is divided by."""
        if self.form == "unary":
            return "request"
        return "token" if self.pace else "stream"


_PASSED_THROUGH: Final = frozenset({OPENAI_PAIR})
_ONLY_TEXT: Final = frozenset({OPENAI_PAIR, TO_TRITON_PAIR, FROM_TRITON_PAIR})
_PLAIN: Final = Traffic(tools=0, logprobs=0)

UNARY: Final = Load(name="non-streaming, 32 clients", count=6_000)
BURST: Final = Load(
    name="burst of 100 tokens, 32 clients", form="stream", count=800, pairs=_ONLY_TEXT
)
PACED: Final = Load(
    name="20 tokens a second, 256 clients",
    form="stream",
    clients=256,
    count=256,
    pace=50_000,
    pairs=_ONLY_TEXT,
)
REPEATED_UNARY: Final = replace(
    UNARY, name=f"repeated: {UNARY.name}", traffic=Traffic(kind="repeated")
)
REPEATED_BURST: Final = replace(
    BURST, name=f"repeated: {BURST.name}", traffic=Traffic(kind="repeated")
)
TOOLS: Final = Load(
    name="tools and tool turns, 32 clients",
    count=4_000,
    traffic=Traffic(tools=1, logprobs=0),
    pairs=_PASSED_THROUGH,
)
RATE: Final = Load(
    name="200 requests a second",
    clients=64,
    rate=200,
    count=800,
    seconds=5.0,
    pairs=_PASSED_THROUGH,
)
"""An open loop, which measures the time that a gateway adds."""
STREAM_RATE: Final = Load(
    name="20 tokens a second, 16 streams a second",
    form="stream",
    clients=256,
    rate=16,
    count=64,
    pace=50_000,
    seconds=5.0,
    pairs=_PASSED_THROUGH,
)
EMBEDDINGS: Final = Load(
    name="embeddings of 1 to 2,000 inputs",
    clients=8,
    count=400,
    traffic=Traffic(kind="embeddings"),
    pairs=_PASSED_THROUGH,
)
TLS: Final = replace(
    UNARY, name="non-streaming over TLS, 32 clients", tls=True, pairs=_PASSED_THROUGH
)


def _style_burst(name: str, models: tuple[str, ...], logprobs: float = 0) -> Load:
    traffic = replace(_PLAIN, models=models, logprobs=logprobs)
    return replace(
        BURST, name=f"burst of 100 tokens, {name}", traffic=traffic, pairs=_PASSED_THROUGH
    )


def _name_models(style: str) -> tuple[str, ...]:
    """Name the models of a style whose chunks are not padded with ``obfuscation``."""
    return tuple(f"{style}-{number}" for number in range(4))


STYLE_BURSTS: Final = (
    _style_burst("vLLM", _name_models("vllm")),
    _style_burst("TGI", _name_models("tgi")),
    _style_burst("llama.cpp", _name_models("llama-cpp")),
    _style_burst("json.dumps", _name_models("python")),
    _style_burst("json.dumps with logprobs", _name_models("python"), 1),
    _style_burst("json.dumps with obfuscation", ("python-4",)),
)


def _images(size: int, label: str, clients: int, count: int) -> Load:
    return Load(
        name=f"images, body of {label}",
        clients=clients,
        count=count,
        seconds=1.5,
        traffic=replace(_PLAIN, kind="images", size=size),
        pairs=_PASSED_THROUGH,
    )


LARGEST: Final = _images(10_000_000, "10 MB", 4, 80)
BODY_SIZES: Final = (
    _images(1_000, "1 kB", 16, 4_000),
    _images(10_000, "10 kB", 16, 4_000),
    _images(100_000, "100 kB", 16, 1_500),
    _images(1_000_000, "1 MB", 8, 300),
    LARGEST,
)


def _clients(count: int) -> Load:
    name = f"non-streaming, {count} client{'s' if count > 1 else ''}"
    return replace(
        UNARY, name=name, clients=count, count=4_000, seconds=1.0, pairs=_PASSED_THROUGH, rounds=2
    )


CLIENTS: Final = (_clients(1), _clients(8), UNARY, _clients(128), _clients(256))


def _many(name: str, models: int, keys: int) -> Load:
    traffic = replace(_PLAIN, models=make_model_names(models), keys=keys)
    return replace(
        UNARY,
        name=name,
        count=4_000,
        seconds=1.0,
        traffic=traffic,
        pairs=_PASSED_THROUGH,
        gateways=frozenset({BASELINE, MANY_MODELS}),
        rounds=2,
    )


MODEL_COUNTS: Final = {
    count: _many(f"models in use: {count:,}", count, 5) for count in (1, 10, 100, MANY)
}
KEY_COUNTS: Final = {
    count: _many(f"API keys in use: {count:,}", 20, count) for count in (1, 10, 100, MANY)
}

QUICK: Final = (
    UNARY,
    TOOLS,
    REPEATED_UNARY,
    BURST,
    *STYLE_BURSTS,
    REPEATED_BURST,
    LARGEST,
    EMBEDDINGS,
    TLS,
    RATE,
    STREAM_RATE,
    PACED,
)
"""The loads of the goals.

Paced streams come last: immediately after them, other loads cost up to twice as much.
"""
FULL: Final = (
    *QUICK[: QUICK.index(LARGEST)],
    *BODY_SIZES,
    *QUICK[QUICK.index(EMBEDDINGS) : QUICK.index(RATE)],
    *(load for load in CLIENTS if load is not UNARY),
    *MODEL_COUNTS.values(),
    *KEY_COUNTS.values(),
    *QUICK[QUICK.index(RATE) :],
)
COMPARED: Final = frozenset(load.name for load in (UNARY, TOOLS, BURST, PACED, *BODY_SIZES))
"""The loads of gateways other than nginx."""
OPEN: Final = Load(
    name="open streams",
    form="stream",
    clients=5_000,
    count=5_000,
    pace=2_000_000,
    seconds=10.0,
    pairs=_PASSED_THROUGH,
)
"""The memory of open streams is measured while all are open."""
