"""The two programs in C, compiled when they are first used, into a folder that git ignores."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
CACHE: Final = HERE.parent.parent / ".bench"
"""What is built and installed for the benchmark."""


def build_program(name: str, folder: Path = CACHE) -> Path:
    """``worker`` or ``load``, compiled again if its source changes.

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
    output = program.with_suffix(f".{os.getpid()}")  # another process may build it, too
    command = [compiler, "-O2", "-o", str(output), str(source)]
    tls = ["-DWITH_TLS", "-lssl", "-lcrypto"] if has_tls() else []
    compiled = subprocess.run([*command, *tls], capture_output=True, text=True, check=False)
    if compiled.returncode:
        raise RuntimeError(f"{source.name} can't be compiled: {compiled.stderr}")
    output.replace(program)
    return program


def has_tls() -> bool:
    """Whether OpenSSL's header files are installed, so that the load generator speaks TLS."""
    return Path("/usr/include/openssl/ssl.h").exists()
