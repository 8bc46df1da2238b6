"""A certificate authority for tests, and the certificates that it signs."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


def _build_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A certificate authority; ``path`` is the file of its own certificate."""

    def __init__(self, folder: Path, name: str = "the tests' authority") -> None:
        self._folder = folder
        self._name = _build_name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._count = 0
        builder = _create_certificate_builder(self._name, self._name, self._key, timedelta(0))
        signed = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path = folder / f"{name.replace(' ', '-')}.pem"
        pem = signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.path.write_bytes(pem)

    @classmethod
    def of_one(cls, folder: Path) -> Self:
        """Create an authority that nobody trusts."""
        return cls(folder, "nobody")

    def issue(
        self, host: str = "127.0.0.1", *, ended: timedelta = timedelta(0), alone: bool = False
    ) -> Path:
        """Write a file with a certificate for this address or name, and its key.

        ``expired`` is how long ago it expired; with ``alone`` it is self-signed.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = _build_name(f"worker {self._count}")
        try:
            alternative: x509.GeneralName = x509.IPAddress(ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        issuer, signer = (name, key) if alone else (self._name, self._key)
        signed = (
            _create_certificate_builder(name, issuer, key, ended)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .sign(signer, hashes.SHA256())
        )
        self._count += 1
        path = self._folder / f"{self._name.rfc4514_string()}-{self._count}.pem"
        path.write_bytes(
            signed.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return path


def _create_certificate_builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ended: timedelta
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + (-ended if ended else _DAY)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - 3 * _DAY)
        .not_valid_after(end)
    )


def create_server_context(pem: Path) -> ssl.SSLContext:
    """Create the TLS context of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


def get_serial(pem: bytes) -> int:
    """Return the serial number of the first certificate in a file."""
    return x509.load_pem_x509_certificate(pem).serial_number
