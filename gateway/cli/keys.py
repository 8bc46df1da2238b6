"""``interlingua keys``: Manage API keys, which the configuration stores as SHA-256."""

import hashlib
import secrets
from typing import Final

import click
import msgspec

from gateway.terminal import print_text
from protocols.core.units import parse_name as check_name

_KEY_PREFIX: Final = "il-"
"""The prefix of every key, by which secret scanners recognize it."""
_KEY_BYTES: Final = 32


@click.group()
def keys() -> None:
    """Manage API keys, which the configuration stores as SHA-256."""


@keys.command()
@click.option("--name", help="The key's name; by default, derived from its digest.")
@click.option("--json", "as_json", is_flag=True, help="Print the key and its digest as JSON.")
def new(name: str | None, *, as_json: bool) -> None:
    """Create a key, and print its entry in the configuration.

    The key is shown only now and stored nowhere: 256 random bits, in characters that need no
    escaping in a URL, a header or a shell. The digest can also protect the admin listener:
    `admin: {sha256: …}`.

    Exit codes: 0 created, 2 wrong usage.
    """
    if name is not None:
        try:
            check_name(name)
        except ValueError as error:
            raise click.BadParameter(f"{name!r} {error}", param_hint="--name") from None
    key = create_key()
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry_name = name or f"key-{digest[:8]}"
    if as_json:
        print_text(msgspec.json.encode({"name": entry_name, "key": key, "sha256": digest}))
        return
    print_text("This key is shown only once. Its entry in the configuration follows.\n", err=True)
    print_text(
        f"{key}\n\nkeys:\n  - {{name: {_quote_yaml(entry_name)}, sha256: {_quote_yaml(digest)}}}"
    )


def create_key() -> str:
    """A new random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _quote_yaml(text: str) -> str:
    """In quotes, since a name or a digest may look like a number or a boolean."""
    return f'"{text}"'
