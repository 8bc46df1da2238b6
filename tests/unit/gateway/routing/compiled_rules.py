"""Builds compiled routing rules."""

from typing import Any

from gateway.config.schema import RouteConfig, RouteMatchConfig, RouteTargetConfig
from gateway.routing.rules import RouteRule, compile_rule


def make_rule(
    name: str,
    model: str | None = None,
    *,
    to: str | None = None,
    version: str | None = None,
    **when: Any,
) -> RouteRule:
    """Build the rule ``name`` for requests for ``model`` with the conditions ``when``."""
    target = RouteTargetConfig(to, version)
    return compile_rule(RouteConfig(name=name, when=RouteMatchConfig(model, **when), to=target))
