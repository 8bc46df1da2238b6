"""What the file may say of where traces and figures go, beside the page of metrics."""

from collections.abc import Mapping
from typing import ClassVar

from gateway.config.pools import Auth
from gateway.config.section import Section, Several
from gateway.config.units import Collector, Header, Secret, Share, Timeout


class Traces(Section, frozen=True):
    """Spans of exchanges, sent to a collector by OTLP over HTTP: never a prompt or an answer.

    ``otlp`` is its base URL, without ``/v1/traces``. A ``sample`` of all exchanges is traced. What
    a client says of a trace is linked to; with ``trust`` it is followed, and decides what is
    sampled. At most ``buffer`` exchanges wait to be sent; what comes beyond is counted.
    """

    short: ClassVar[str] = "otlp"

    otlp: Collector
    sample: Share = 0.05
    trust: bool = False
    auth: Auth | None = None
    headers: Mapping[Header, Secret] = {}
    """Of each request to the collector."""
    buffer: Several = 10_000


class Push(Section, frozen=True):
    """Figures of OpenTelemetry's conventions for generative models, sent by OTLP over HTTP.

    ``otlp`` is the collector's base URL, without ``/v1/metrics``.
    """

    short: ClassVar[str] = "otlp"

    otlp: Collector
    every: Timeout = 60.0
    auth: Auth | None = None
    headers: Mapping[Header, Secret] = {}


class Figures(Section, frozen=True):
    """What is counted of exchanges is told at the admin listener, under ``/metrics``.

    With ``vllm_compat`` there are vLLM's names for it, too, so that what reads vLLM's page reads
    the gateway's. ``push`` sends some of it to a collector.
    """

    vllm_compat: bool = False
    push: Push | None = None
