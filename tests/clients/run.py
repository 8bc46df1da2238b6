"""``python -m tests.clients.run ENVIRONMENT``: what ``make clients`` runs.

The clients that have an environment of their own, those for Node.js, and then the suite that
openai-python tests itself with, all before a running gateway.
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


def main(environment: Path) -> int:
    """0 when all is as it should be."""
    with run_gateway(SCRIPTED) as scripted:
        with run_built_in_models() as small, _run_agents_gateway() as agents:
            variables = {
                "SCRIPTED_URL": scripted,
                "BUILT_IN_URL": small,
                "AGENTS_URL": agents,
                "NODE_CLIENTS": str((environment / "node").absolute()),
            }
            others = _run_tests(environment, FOLDER / "others", variables)
            others = _run_tests(environment / "agents", FOLDER / "agents", variables) or others
        node = _run_node_clients(environment / "node", scripted)
        own = suite.run(environment / f"openai-{suite.VERSION}", scripted)
    return others or node or own


@contextmanager
def _run_agents_gateway() -> Iterator[str]:
    """A gateway before the worker with a script of tool calls."""
    with (
        run_chat_worker() as worker,
        run_gateway(str(FOLDER / "agents.yaml"), env={"WORKER_URL": worker}) as url,
    ):
        yield url


def _run_tests(environment: Path, folder: Path, variables: Mapping[str, str]) -> int:
    command = [str(environment / "bin" / "python"), "-m", "pytest", "--quiet", str(folder)]
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


def _run_node_clients(environment: Path, scripted: str) -> int:
    """Clients that Node.js runs. Those that are not installed are skipped."""
    options = "addopts=-ra --strict-markers --import-mode=importlib"  # which do not ignore them
    command = [sys.executable, "-m", "pytest", "--quiet", "-o", options, str(NODE)]
    variables = {"SCRIPTED_URL": scripted, "NODE_CLIENTS": str(environment.resolve())}
    return subprocess.run(command, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
