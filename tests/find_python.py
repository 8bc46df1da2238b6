"""``python -m tests.find_python 3.12`` prints the path of that interpreter, or exits with 1.

It searches PATH, pyenv's and uv's interpreters.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = (
    Path(os.environ.get("PYENV_ROOT") or "~/.pyenv") / "versions",
    Path("~/.local/share/uv/python"),
)


def find_python(release: str) -> str | None:
    """Return the first interpreter of this release that starts."""
    for path in _list_candidates(release):
        command = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == release:
            return path
    return None


def _list_candidates(release: str) -> Iterator[str]:
    yield f"python{release}"  # this may be a shim of pyenv that does not start
    for folder in _FOLDERS:
        for candidate in sorted(folder.expanduser().glob(f"*{release}*/bin/python"), reverse=True):
            yield str(candidate)


if __name__ == "__main__":
    [wanted] = sys.argv[1:]
    python_path = find_python(wanted)
    if python_path is None:
        sys.exit(1)
    sys.stdout.write(f"{python_path}\n")
