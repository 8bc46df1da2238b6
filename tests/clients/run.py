"""``python -m tests.clients.run ENVIRONMENT``: what ``make clients`` runs.

The clients with an environment of their own, those for Node.js, and then openai-python's own test
suite, all with a running gateway.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.clients import suite
from tests.clients.chat_worker import run_chat_worker
from tests.clients.gateway_process import SCRIPTED, run_built_in_models, run_gateway

FOLDER: Final = Path(__file__).parent
NODE: Final = Path(__file__).with_name("node")
NOT_RUN: Final = {
    "Crush": "its npm package downloads the program from a release page when it is installed",
    "Open WebUI": "its package takes 1.9 GB beside torch; its requests are in docs/howto",
}
"""Clients that are not run, with the reason."""


def main(environment: Path) -> int:
    """Return 0 if all tests pass."""
    with run_gateway(SCRIPTED) as scripted:
        with run_built_in_models() as small, _run_agents_gateway() as agents:
            variables = {
                "SCRIPTED_URL": scripted,
                "BUILT_IN_URL": small,
                "AGENTS_URL": agents,
                "NODE_CLIENTS": str((environment / "node").absolute()),
            }
            others = _run_tests(environment, FOLDER / "others", variables)
            for name in ("agents", "databricks"):
                others = _run_tests(environment / name, FOLDER / name, variables) or others
        node = _run_node_clients(environment / "node", scripted)
        own = suite.run(environment / f"openai-{suite.VERSION}", scripted)
    for name, reason in NOT_RUN.items():
        print(f"not run: {name}: {reason}")  # noqa: T201 - it is for readers
    return others or node or own


@contextmanager
def _run_agents_gateway() -> Iterator[str]:
    """Run a gateway with the worker that calls tools by a script."""
    with (
        run_chat_worker() as worker,
        run_gateway(str(FOLDER / "agents.yaml"), env={"WORKER_URL": worker}) as url,
    ):
        yield url


def _run_tests(environment: Path, folder: Path, variables: Mapping[str, str]) -> int:
    command = [str(environment / "bin" / "python"), "-m", "pytest", "--quiet", str(folder)]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


def _run_node_clients(environment: Path, scripted: str) -> int:
    """Run the Node.js clients; those that are not installed are skipped."""
    options = "addopts=-ra --strict-markers --import-mode=importlib"  # without ignored folders
    command = [sys.executable, "-m", "pytest", "--quiet", "-o", options, str(NODE)]
    variables = {"SCRIPTED_URL": scripted, "NODE_CLIENTS": str(environment.resolve())}
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
