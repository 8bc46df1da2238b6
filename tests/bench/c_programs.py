"""Compiles the two C programs at first use, into a folder that git ignores."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parent.parent / ".bench"
"""Compiled programs and installed peers."""


def build_program(name: str, folder: Path = CACHE) -> Path:
    """Compile ``worker`` or ``load`` unless it is newer than its source.

    Raises RuntimeError with the compiler's output if that fails.
    """
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    program = folder / f"{name}-{digest}"
    if program.exists():
        return program
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc) here")
    folder.mkdir(exist_ok=True)
    output = program.with_suffix(f".{os.getpid()}")  # another process may compile it, too
    command = [compiler, "-O2", "-o", str(output), str(source)]
    tls = ["-DWITH_TLS", "-lssl", "-lcrypto"] if has_tls() else []
    compiled = subprocess.run([*command, *tls], capture_output=True, text=True, check=False)
    if compiled.returncode:
        raise RuntimeError(f"{source.name} can't be compiled: {compiled.stderr}")
    output.replace(program)
    return program


def has_tls() -> bool:
    """Return whether OpenSSL's headers are installed, which TLS in the load generator needs."""
    return Path("/usr/include/openssl/ssl.h").exists()
