"""Whether traces and figures can be sent where the file says."""

import importlib.util

from gateway.config.complaints import Steps
from gateway.config.ground import Ground, known
from gateway.config.shape import Config

_LACKS = "needs OpenTelemetry's client of OTLP; install it with: pip install 'interlingua[otel]'"


def check(config: Config, ground: Ground) -> None:
    """Complain of what nothing can be sent by, and of figures that nobody could read."""
    observe = config.observe
    if not known(observe):
        return
    if known(observe.traces) and observe.traces is not None:
        _check_there(("observe", "traces"), ground)
    figures = observe.metrics
    if not known(figures):
        return
    if known(figures.push) and figures.push is not None:
        _check_there(("observe", "metrics", "push"), ground)
    if known(figures.vllm_compat) and figures.vllm_compat and config.admin is None:
        message = "nobody could read it; give the gateway an admin listener: admin: {address: ...}"
        ground.say(("observe", "metrics", "vllm_compat"), message)


def _check_there(path: Steps, ground: Ground) -> None:
    if not _installed():
        ground.say(path, _LACKS, key=True)


def _installed() -> bool:
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        return False
    return found is not None and importlib.util.find_spec("opentelemetry.sdk") is not None
