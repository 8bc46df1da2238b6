"""Whether who signs tokens can be asked, and is who he says."""

import importlib.util
import ssl
from urllib.parse import urlsplit

from gateway.config.addresses import literal
from gateway.config.certificates import reason
from gateway.config.complaints import Steps
from gateway.config.ground import Ground, known
from gateway.config.shape import Config

_PATH = ("identity",)


def check(config: Config, ground: Ground) -> None:
    """Complain of an issuer whose keys can't be had, or could be anybody's."""
    identity = config.identity
    if not known(identity) or identity is None:
        return
    if importlib.util.find_spec("jwt") is None or importlib.util.find_spec("cryptography") is None:
        message = "tokens need a library; install it with: pip install 'interlingua[jwt]'"
        ground.say(_PATH, message, key=True)
    name = "issuer" if identity.jwks is None else "jwks"  # who tells where the keys are
    url = getattr(identity, name)
    if known(url):
        _check_url(url, (*_PATH, name), ground)
    if known(identity.tls) and identity.tls is not None and known(identity.tls.ca):
        try:
            ssl.create_default_context(cafile=identity.tls.ca)
        except OSError as error:
            message = f"can't be used: {reason(error)}; give certificates in PEM"
            ground.say((*_PATH, "tls", "ca"), message)


def _check_url(url: str, path: Steps, ground: Ground) -> None:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    host = parts.hostname or ""
    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        ground.say(path, "is no URL of an issuer's; write it as https://login.example.com/realm")
        return
    found = literal(host)
    here = host == "localhost" if found is None else found.is_loopback
    if parts.scheme == "http" and not here:
        message = "whoever is on the way could put in keys of his own; write https://"
        ground.say(path, message)
