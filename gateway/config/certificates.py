"""Whether certificates and keys are any: a file may be half-written, or another's key."""

import ssl

from gateway.config.ground import Ground, known
from gateway.config.pools import Pool
from gateway.config.shape import Config


def check(config: Config, ground: Ground) -> None:
    """Complain of those that nobody could be met with, or trusted by."""
    if known(config.listeners):
        for number, listener in enumerate(config.listeners):
            tls = known(listener) and known(listener.tls) and listener.tls
            if tls and known(tls.cert) and known(tls.key):
                _check_pair(tls.cert, tls.key, number, ground)
    if known(config.backends):
        for name, backend in config.backends.items():
            trust = (
                known(backend) and isinstance(backend, Pool) and known(backend.tls) and backend.tls
            )
            if trust and known(trust.ca):
                _check_trust(trust.ca, name, ground)


def served(cert: str, key: str) -> ssl.SSLContext:
    """What meets clients with this chain. Raises OSError for files that are no such pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password=str)  # or it would ask at the terminal
    return context


def reason(error: OSError) -> str:
    """What the system says; what OpenSSL does, which shouts or says nothing, in words."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return error.reason.replace("_", " ").lower() if error.reason else "it is not in PEM"


def _check_pair(cert: str, key: str, number: int, ground: Ground) -> None:
    try:
        served(cert, key)
    except OSError as error:
        mend = "give a chain in PEM, and the key that belongs to it, without a password"
        ground.say(("listeners", number, "tls"), f"can't be used: {reason(error)}; {mend}")


def _check_trust(ca: str, name: str, ground: Ground) -> None:
    try:
        ssl.create_default_context(cafile=ca)
    except OSError as error:
        message = f"can't be used: {reason(error)}; give certificates in PEM"
        ground.say(("backends", name, "tls", "ca"), message)
