"""Writes the hashes of pinned packages into requirement files: ``python -m tests.pins FILE …``.

The hashes come from the package index (the JSON form of its simple API). Only wheels that pip could
install on Linux or macOS are listed; pip rejects every other file.
"""

import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

INDEX = "https://pypi.org/simple"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_TAGS = re.compile(r"-([^-]+)-([^-]+)-([^-]+)\.whl$")
_PLATFORM = re.compile(r"any|manylinux.*(x86_64|aarch64)|linux_x86_64|macosx_.*(arm64|universal2)")


def is_installable(filename: str) -> bool:
    """Return whether this is a wheel for CPython 3.11 to 3.14 on a supported platform."""
    if (tags := _TAGS.search(filename)) is None:
        return False
    python, abi, platform = tags.groups()
    is_stable = abi in {"abi3", "none"} and "cp3" in python
    fits = is_stable or "py3" in python or re.search(r"cp31[1-4]", python) is not None
    return fits and not abi.endswith("t") and _PLATFORM.search(platform) is not None


def select_hashes(files: Mapping[str, str], version: str) -> list[str]:
    """Return the SHA-256 digests of ``version``'s installable wheels among ``files``."""
    prefix = re.compile(rf"^[^-]+-{re.escape(version)}(\+[^-]+)?-")
    return sorted(d for name, d in files.items() if prefix.match(name) and is_installable(name))


def write_hashes(text: str, hashes: Mapping[tuple[str, str], list[str]]) -> str:
    """Return the requirement file ``text`` with the hashes of each pin, by name and version."""
    lines = []
    for line in re.sub(r"\s*\\\n\s*--hash=\S+", "", text).splitlines():
        pin = _PIN.match(line)
        digests = hashes[pin[1], pin[2]] if pin else []
        lines.append(" \\\n".join([line, *(f"    --hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def main(paths: list[str]) -> None:
    """Rewrite the files."""
    texts = {Path(path): Path(path).read_text("utf-8") for path in paths}
    names = {
        pin[1] for text in texts.values() for line in text.splitlines() if (pin := _PIN.match(line))
    }
    with httpx.Client(headers={"Accept": "application/vnd.pypi.simple.v1+json"}) as client:

        def fetch(name: str) -> dict[str, str]:
            response = client.get(f"{INDEX}/{name.lower().replace('_', '-').replace('.', '-')}/")
            files = response.raise_for_status().json()["files"]
            return {file["filename"]: file["hashes"]["sha256"] for file in files}

        with ThreadPoolExecutor(8) as pool:
            listings = dict(zip(names, pool.map(fetch, names), strict=True))
    for path, text in texts.items():
        own = [(pin[1], pin[2]) for line in text.splitlines() if (pin := _PIN.match(line))]
        hashes = {pin: select_hashes(listings[pin[0]], pin[1]) for pin in own}
        missing = [
            f"{name} {version}"
            for (name, version), file_hashes in hashes.items()
            if not file_hashes
        ]
        if missing:
            sys.exit(f"{path}: the index has no wheel of {', '.join(missing)}")
        path.write_text(write_hashes(text, hashes), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
