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
    """``worker`` or ``load``, ready to run; made anew when its source changes.

    Raises RuntimeError where it can't be made, saying why.
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
    beside = program.with_suffix(f".{os.getpid()}")  # another may build it at the same time
    made = subprocess.run(
        [compiler, "-O2", "-o", str(beside), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"{source.name} can't be compiled: {made.stderr}")
    beside.replace(program)
    return program
