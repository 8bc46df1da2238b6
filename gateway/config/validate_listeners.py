"""Checks listeners: their addresses, protocols and keys."""

import re
from typing import Final

from gateway.config.errors import ConfigPath
from gateway.config.schema import ApiKeyConfig, Config, ModelConfig
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
