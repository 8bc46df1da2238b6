"""Renders or lints a Helm chart: run with the environment that has Helm.

render_chart.py CHART VALUES.json       prints the manifests, or the error
render_chart.py CHART --lint CONFIG     prints the problems that Helm finds
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python  # type: ignore[import-not-found]  # it is in .venv-deploy alone

_WARNING = 2


def lint_chart(chart: str, values: dict[str, Any]) -> str:
    """Return the problems that are worse than hints, such as a missing icon."""
    messages = helm_python.lint(chart, values)["messages"]
    return "\n".join(one["error"] for one in messages if one["severity"] >= _WARNING)


def render_chart(chart: str, values: dict[str, Any]) -> str:
    """Render all manifests without the notes."""
    with helm_python.Chart.load(chart) as loaded:
        manifests = loaded.render(values, name="interlingua", namespace="models")
    return "\n---\n".join(text for name, text in manifests.items() if name.endswith(".yaml"))


def main(chart: str, *action: str) -> None:
    """Print the result on standard output, errors on standard error."""
    try:
        match action:
            case ("--lint", config):
                sys.stdout.write(lint_chart(chart, {"config": Path(config).read_text("utf-8")}))
            case (values,):
                overrides = json.loads(Path(values).read_text("utf-8"))
                sys.stdout.write(render_chart(chart, overrides))
            case _:
                sys.exit(__doc__)
    except helm_python.HelmError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
