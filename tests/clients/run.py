"""``python -m tests.clients.run ENVIRONMENT``: what ``make clients`` runs.

The clients that have an environment of their own, those for Node.js, and then the suite that
openai-python tests itself with, all before a running gateway.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.clients import suite
from tests.clients.gateway_process import SCRIPTED, run_built_in_models, run_gateway

OTHERS: Final = Path(__file__).with_name("others")
NODE: Final = Path(__file__).with_name("node")


def main(environment: Path) -> int:
    """0 when all is as it should be."""
    with run_gateway(SCRIPTED) as scripted:
        with run_built_in_models() as small:
            others = _run_other_clients(
                environment, {"SCRIPTED_URL": scripted, "BUILT_IN_URL": small}
            )
        node = _run_node_clients(environment / "node", scripted)
        own = suite.run(environment / f"openai-{suite.VERSION}", scripted)
    return others or node or own


def _run_other_clients(environment: Path, urls: Mapping[str, str]) -> int:
    command = [str(environment / "bin" / "python"), "-m", "pytest", "--quiet", str(OTHERS)]
    return subprocess.run(command, env=os.environ | urls, check=False).returncode


def _run_node_clients(environment: Path, scripted: str) -> int:
    """Clients that Node.js runs. Those that are not installed are skipped."""
    options = "addopts=-ra --strict-markers --import-mode=importlib"  # which do not ignore them
    command = [sys.executable, "-m", "pytest", "--quiet", "-o", options, str(NODE)]
    told = {"SCRIPTED_URL": scripted, "NODE_CLIENTS": str(environment.resolve())}
    return subprocess.run(command, env=os.environ | told, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
