"""The commands of README and tutorial work from an empty folder."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.docs.pages import describe_difference, parse_blocks

pytestmark = pytest.mark.slow  # it loads the built-in model

ROOT: Final = Path(__file__).parents[2]
README: Final = (ROOT / "README.md").read_text("utf-8")
TUTORIAL: Final = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
SHOWN_ADDRESS: Final = "127.0.0.1:8000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def ui_url(folder: Path, address: str) -> Iterator[str]:
    """The URL of the web UI that the tutorial's command prints once it serves."""
    [command] = re.findall(r"^\$ (interlingua serve)$", TUTORIAL, re.MULTILINE)
    log = folder / "log"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PORT": address.rpartition(":")[2],
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.split(), cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        url = wait_for(lambda: _find_ui_url(process, log))
        yield str(url)
    finally:
        process.terminate()
        process.wait()


def _find_ui_url(process: "subprocess.Popen[bytes]", log: Path) -> str | None:
    text = log.read_text("utf-8")
    assert process.poll() is None, text
    match = re.search(r"web UI: (http://[^\s\"]+)", text)
    return match[1] if match and "is ready: generate" in text else None


def wait_for(check: Callable[[], Any]) -> Any:
    """Wait for the first true result of a check, and return it."""
    for _ in range(600):
        if result := check():
            return result
        time.sleep(0.2)
    raise AssertionError("the condition did not become true")


def test_first_request_of_the_readme_gets_the_documented_answer(
    ui_url: str, folder: Path, address: str
) -> None:
    block = parse_blocks(README)[0]
    assert ui_url
    assert SHOWN_ADDRESS in block.commands
    assert block.printed

    command = block.commands.replace(SHOWN_ADDRESS, address)
    response = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert describe_difference(block.printed, response.stdout) == ""


def test_charts_of_the_web_ui_show_the_readme_requests(
    ui_url: str, folder: Path, address: str
) -> None:
    page = httpx.get(ui_url.partition("#")[0], timeout=30)
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]

    before = count_requests(ui_url)
    block = parse_blocks(README)[0]
    command = block.commands.replace(SHOWN_ADDRESS, address)
    subprocess.run(["/bin/bash", "-euc", command], cwd=folder, check=True, capture_output=True)
    wait_for(lambda: count_requests(ui_url) > before)


def count_requests(ui_url: str) -> float:
    """Return the sum of the points in the web UI's chart of requests per second."""
    history = httpx.get(httpx.URL(ui_url).join("/-/history"), timeout=30).raise_for_status().json()
    return sum(
        float(point.get("requests", 0))
        for version in history["versions"]
        if version["model"] == "smollm2"
        for point in version["points"]
    )
