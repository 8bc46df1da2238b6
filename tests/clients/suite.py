"""openai-python's own test suite with a running gateway.

openai_suite.txt lists the expected failures by name, with reasons; exactly those must fail.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import openai

VERSION: Final = openai.__version__
LIST: Final = Path(__file__).with_name("openai_suite.txt")
FILES: Final = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_models.py",
)
_FOLDER: Final = "tests/api_resources/"
_OUTCOME = re.compile(rf"^(PASSED|FAILED|ERROR) {_FOLDER}(\S+)", re.MULTILINE)


def run(sources: Path, url: str) -> int:
    """Run the suite of these sources; return 0 if exactly the expected tests fail."""
    passed, outcomes = _run_tests(sources, url)
    faults = find_deviations(passed, parse_expected_failures(LIST.read_text("utf-8")))
    if not passed:
        faults = [f"no test ran:\n{outcomes}"]
    sys.stdout.write("".join(f"FAILED  {fault}\n" for fault in faults))
    sys.stdout.write(
        f"openai {VERSION}'s own suite: of {len(passed)} tests {sum(passed.values())} pass and"
        f" {len(faults)} are not as {LIST.name} says\n"
    )
    return int(bool(faults))


def parse_expected_failures(text: str) -> list[str]:
    """Return the names in the list. ``*`` in one matches anything."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def find_deviations(passed: Mapping[str, bool], names: Sequence[str]) -> list[str]:
    """Return the differences from the list. ``passed`` maps each test to its result."""
    patterns = {name: re.compile(re.escape(name).replace(r"\*", ".*")) for name in names}
    faults = [
        f"{name} is listed, and there is no such test"
        for name, pattern in patterns.items()
        if not any(map(pattern.fullmatch, passed))
    ]
    for test, well in passed.items():
        listed = any(pattern.fullmatch(test) for pattern in patterns.values())
        if well and listed:
            faults.append(f"{test} passes: take it off the list")
        elif not well and not listed:
            faults.append(test)
    return faults


def _run_tests(sources: Path, url: str) -> tuple[dict[str, bool], str]:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    shown = ["-q", "-rpfE", "--tb=no", "--show-capture=no", *(_FOLDER + file for file in FILES)]
    env = os.environ | {"TEST_API_BASE_URL": f"{url}/v1"}
    ended = subprocess.run(
        [*command, *shown], cwd=sources, env=env, capture_output=True, text=True, check=False
    )
    outcomes = _OUTCOME.findall(ended.stdout)
    return {name: how == "PASSED" for how, name in outcomes}, ended.stdout + ended.stderr
