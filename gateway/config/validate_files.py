"""Checks what a configuration needs on this machine: certificates, templates, models and packages.

This is the only module of the configuration's checks that builds TLS contexts and looks for
installed packages.
"""

import importlib.util
import ssl
from collections.abc import Sequence

from backends.pool.settings import ClientTlsSettings
from backends.torch.model_files import ENGINE_TASKS, UnsupportedModelError, check_files
from backends.torch.settings import TorchSettings
from gateway.config.errors import ConfigPath
from gateway.config.registry import find_template_error
from gateway.config.schema import TlsConfig
from gateway.config.validation_context import ValidationContext, is_set


def is_installed(module: str) -> bool:
    """Whether a module can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_installed(
    modules: Sequence[str], message: str, path: ConfigPath, context: ValidationContext
) -> None:
    """Report ``message`` on the key at ``path`` unless all of these modules can be imported."""
    if not all(map(is_installed, modules)):
        context.add_issue(path, message, key=True)


def check_model_files(
    settings: TorchSettings, path: ConfigPath, context: ValidationContext
) -> None:
    """Report files that are there and that the local engine can't serve.

    A package that is not installed is not reported: the gateway may run on another machine.
    """
    if not is_set(settings.path) or not settings.path:
        return
    try:
        dtype = settings.dtype if is_set(settings.dtype) else "auto"
        task = ENGINE_TASKS.get(settings.task) if is_set(settings.task) else None
        check_files(settings.path, dtype, task)
    except UnsupportedModelError as error:
        context.add_issue((*path, "path"), str(error))


def check_key_pair(tls: TlsConfig, path: ConfigPath, context: ValidationContext) -> None:
    """Report a certificate and key that can't be used, or that don't belong together."""
    try:
        tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls_context.load_cert_chain(
            tls.cert, tls.key, password=str
        )  # otherwise OpenSSL asks on the terminal
    except OSError as error:
        hint = "give a certificate chain in PEM and its key, without a password"
        context.add_issue(path, f"can't be used: {_tls_error(error)}; {hint}")


def check_ca(trust: ClientTlsSettings, path: ConfigPath, context: ValidationContext) -> None:
    """Report CA certificates of the ``tls`` section at ``path`` that can't be used."""
    if not is_set(trust.ca):
        return
    try:
        ssl.create_default_context(cafile=trust.ca)
    except OSError as error:
        message = f"can't be used: {_tls_error(error)}; give certificates in PEM"
        context.add_issue((*path, "ca"), message)


def _tls_error(error: OSError) -> str:
    """The system's error message, or OpenSSL's reason in lower case."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return error.reason.replace("_", " ").lower() if error.reason else "it is not in PEM"


def check_template(template: str | None, path: ConfigPath, context: ValidationContext) -> None:
    """Report a chat template that can't be compiled."""
    if not is_set(template) or template is None:
        return
    if error := find_template_error(template):
        context.add_issue(path, error)
