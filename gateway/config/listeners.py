"""Listeners: their identity across configurations, changes that need a restart, their URLs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.config.errors import ConfigPath
from gateway.config.schema import Config, ListenerConfig

ListenerId = tuple[str, int]
"""A listener's address, and how many listeners before it have the same address: several listeners
may each use any free port."""


def listener_name(listener: ListenerId) -> str:
    """A listener's address, followed by its number if several listeners have this address."""
    address, number = listener
    return f"{address} ({number + 1})" if number else address


def listeners_by_id(config: Config) -> Mapping[ListenerId, ListenerConfig]:
    """The listeners of a configuration, in their order."""
    numbers = Counter[str]()
    listeners = {}
    for listener in config.listeners:
        listeners[listener.address, numbers[listener.address]] = listener
        numbers[listener.address] += 1
    return listeners


def restart_required(old: Config, new: Config) -> Iterator[tuple[ConfigPath, str]]:
    """Each part of ``new`` that a gateway with ``old`` can't load without a restart, and why."""
    old_address, new_address = old.admin and old.admin.address, new.admin and new.admin.address
    if old_address != new_address:
        current = f"it is at {old_address}" if old_address else "there is none"
        yield ("admin",), f"{current} for as long as the gateway runs; restart it"
    for name in ("state", "stored_responses", "observe"):
        if getattr(old, name) != getattr(new, name):
            yield (name,), "can't change for as long as the gateway runs; restart it"
    current_listeners = listeners_by_id(old)
    for number, (listener_id, listener) in enumerate(listeners_by_id(new).items()):
        current_listener = current_listeners.get(listener_id)
        if current_listener is None:
            continue
        if (current_listener.tls is None) != (listener.tls is None):
            message = "turning TLS on or off needs a restart or another port"
            yield ("listeners", number, "tls"), message


_MAX_SHOWN_MODELS: Final = 20


def describe_serving(models: Sequence[str], urls: Sequence[str]) -> str:
    """What is served where, for people; no ``models``: whatever the clients name."""
    more = len(models) - _MAX_SHOWN_MODELS
    names = ", ".join(models[:_MAX_SHOWN_MODELS]) + (f" and {more} more" if more > 0 else "")
    return f"interlingua serves {names or 'every model name'} on {' and '.join(urls)}"


def build_ui_url(admin_url: str, key: str | None) -> str:
    """The web UI's URL; a key is in its fragment, which browsers do not send."""
    return f"{admin_url}/-/ui/" + (f"#key={key}" if key else "")
