"""What the file may say of where traces and figures go, beside the page of metrics."""

from collections.abc import Mapping
from typing import ClassVar

from gateway.config.pools import UpstreamAuthConfig
from gateway.config.section import ConfigSection, PositiveInt
from gateway.config.units import CollectorUrl, HeaderName, Secret, Share, Timeout


class TracingConfig(ConfigSection, frozen=True):
    """Spans of exchanges, sent to a collector by OTLP over HTTP: never a prompt or an answer.

    ``otlp`` is its base URL, without ``/v1/traces``. A ``sample`` of all exchanges is traced. What
    a client says of a trace is linked to; with ``trust`` it is followed, and decides what is
    sampled. At most ``buffer`` exchanges wait to be sent; what comes beyond is counted.
    """

    short: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    sample: Share = 0.05
    trust: bool = False
    auth: UpstreamAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}
    """Of each request to the collector."""
    buffer: PositiveInt = 10_000


class OtlpMetricsConfig(ConfigSection, frozen=True):
    """Figures of OpenTelemetry's conventions for generative models, sent by OTLP over HTTP.

    ``otlp`` is the collector's base URL, without ``/v1/metrics``.
    """

    short: ClassVar[str] = "otlp"

    otlp: CollectorUrl
    every: Timeout = 60.0
    auth: UpstreamAuthConfig | None = None
    headers: Mapping[HeaderName, Secret] = {}


class MetricsConfig(ConfigSection, frozen=True):
    """What is counted of exchanges is told at the admin listener, under ``/metrics``.

    With ``vllm_compat`` there are vLLM's names for it, too, so that what reads vLLM's page reads
    the gateway's. ``push`` sends some of it to a collector.
    """

    vllm_compat: bool = False
    push: OtlpMetricsConfig | None = None
