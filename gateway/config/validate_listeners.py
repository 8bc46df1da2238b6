"""Checks listeners: their addresses, protocols and keys."""

import re
from typing import Final

from gateway.config.errors import ConfigPath, quote, suggest_name
from gateway.config.registry import EndpointIndex, describe_type_mismatch
from gateway.config.schema import (
    ApiKeyConfig,
    Config,
    ListenerConfig,
    ListenerProtocolConfig,
    ModelConfig,
)
from gateway.config.validate_files import check_key_pair
from gateway.config.validation_context import ValidationContext, is_set
from protocols.core.units import parse_ip, split_address

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})
_ALLOWED_HOST: Final = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[\w-]+(\.[\w-]+)*", re.ASCII)
"""A name, an address, or every name; IPv6 in brackets, as in ``Host``."""


def check_listeners(config: Config, context: ValidationContext, *, insecure: bool) -> None:
    """Report addresses that conflict, or that are reachable without authentication."""
    addresses: list[tuple[str, int]] = []
    if is_set(config.admin) and config.admin is not None and is_set(config.admin.address):
        address, address_path = config.admin.address, ("admin", "address")
        _check_listen_address(address, address_path, addresses, context)
        if config.admin.sha256 is None and not is_loopback(address):
            context.add_issue(
                address_path,
                "anyone who reaches this address could change the workers; "
                "set the sha256 of an admin key, or listen on 127.0.0.1",
            )
        if config.admin.key_for == "changes" and not is_loopback(address):
            context.add_issue(
                ("admin", "key_for"),
                "beyond loopback addresses every request needs the key; remove key_for",
            )
    if not is_set(config.listeners):
        return
    for n, listener in enumerate(config.listeners):
        path = ("listeners", n)
        if not is_set(listener):
            continue
        if listener.proxy_protocol is not None and listener.trusted_proxies == ():
            context.add_issue(
                (*path, "proxy_protocol"),
                "anyone could name another address: set trusted_proxies to the proxies' networks",
            )
        for number, host in enumerate(listener.allowed_hosts):
            if is_set(host) and not _ALLOWED_HOST.fullmatch(host):
                message = "no Host can match this: write a name alone, such as gateway.example"
                context.add_issue(
                    (*path, "allowed_hosts", number),
                    f"{message}, without scheme, port, path, blank or final dot; * is every name",
                )
        if is_set(listener.address):
            _check_listen_address(listener.address, (*path, "address"), addresses, context)
            if not insecure and _has_no_auth(config) and not is_loopback(listener.address):
                context.add_issue(
                    (*path, "address"),
                    "anyone who reaches this address may use every model, since there are no keys; "
                    "add keys, listen on 127.0.0.1, or start with --insecure-no-auth",
                )


def _has_no_auth(config: Config) -> bool:
    """Whether neither API keys nor tokens are configured."""
    return config.keys == () and config.keys_file is None and config.identity is None


def _check_listen_address(
    address: str, path: ConfigPath, addresses: list[tuple[str, int]], context: ValidationContext
) -> None:
    host, port = split_address(address)
    for other, other_port in addresses:
        is_same_host = host == other or not _WILDCARD_HOSTS.isdisjoint((host, other))
        if port and port == other_port and is_same_host:
            context.add_issue(
                path,
                f"another listener uses {other}:{other_port} already; "
                "choose another port, or serve the protocols on one listener",
            )
            return
    addresses.append((host, port))


def is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    ip = parse_ip(host)
    return ip.is_loopback if ip is not None else host == "localhost"


def check_client_protocol(
    section: ApiKeyConfig | ModelConfig, path: ConfigPath, context: ValidationContext
) -> None:
    """Report a protocol of a key or a model that clients can't speak."""
    if is_set(section.protocol) and section.protocol is not None:
        context.check_client_protocol(section.protocol, None, (*path, "protocol"))


def _list_preferred_protocols(config: Config) -> frozenset[str]:
    """The protocols that a key or a model names, for paths that several protocols share."""
    keys = config.keys if is_set(config.keys) else ()
    models = config.models.values() if is_set(config.models) else ()
    sections = [section for section in (*keys, *models) if is_set(section)]
    return frozenset(h.protocol for h in sections if is_set(h.protocol) and h.protocol is not None)


def check_listener_endpoints(config: Config, context: ValidationContext) -> None:
    """Report unusable certificates and protocols, and paths that two protocols share."""
    if not is_set(config.listeners):
        return
    preferred = _list_preferred_protocols(config)
    for number, listener in enumerate(config.listeners):
        if is_set(listener):
            _check_listener(listener, ("listeners", number), context, preferred)


def _check_listener(
    listener: ListenerConfig,
    path: ConfigPath,
    context: ValidationContext,
    preferred: frozenset[str],
) -> None:
    """``preferred`` protocols may share their paths with others."""
    tls = is_set(listener.tls) and listener.tls
    if tls and is_set(tls.cert) and is_set(tls.key):
        check_key_pair(tls, (*path, "tls"), context)
    if not is_set(listener.protocols):
        return
    claims = {True: EndpointIndex(), False: EndpointIndex()}
    """Protocols whose clients send a version header may share paths with those whose do not."""
    for n, protocol in enumerate(listener.protocols):
        if not is_set(protocol) or not is_set(protocol.name):
            continue
        at = (*path, "protocols", n)
        endpoints = _check_listener_protocol(protocol, at, context)
        if endpoints is None or not is_set(protocol.prefix):
            continue
        keys = [(method, protocol.prefix + endpoint_path) for method, endpoint_path in endpoints]
        index = claims[context.protocols.has_version_header(protocol.name)]
        if not (listener.protocol_header is True or protocol.name in preferred):
            shared = min(filter(None, map(index.find_shared, keys)), default=None)
            if shared:
                (method, shared_path), owner = shared
                context.add_issue(
                    at,
                    f"{method} {shared_path} belongs to {owner} on this listener already; "
                    f"give this one a prefix: {{name: {protocol.name}, "
                    f"prefix: /{protocol.name}}}, or set it as the protocol of a key or a model",
                )
        for key in keys:
            index.add(key, protocol.name)


def _check_listener_protocol(
    protocol: ListenerProtocolConfig, path: ConfigPath, context: ValidationContext
) -> frozenset[tuple[str, str]] | None:
    """The endpoints of a protocol on a listener; None if it has an issue, which is reported."""
    if not context.check_client_protocol(
        protocol.name, protocol.profile, (*path, "name"), (*path, "profile")
    ):
        return None
    option_types = context.protocols.get_options(protocol.name)
    is_valid = True
    for key, value in protocol.options.items():
        at = (*path, key)
        if key not in option_types:
            fields = ["name", "profile", "prefix", "keep_alive", *option_types]
            context.add_issue(
                at, f"there is no {quote(key)} here; {suggest_name(key, fields)}", key=True
            )
            is_valid = False
        elif not is_set(value):
            is_valid = False
        elif mismatch := describe_type_mismatch(value, option_types[key]):
            context.add_issue(at, mismatch)
            is_valid = False
    if not is_valid:
        return None
    try:
        return context.protocols.endpoints(protocol.name, protocol.profile, protocol.options)
    except ValueError as error:
        context.add_issue(path, str(error))
        return None
