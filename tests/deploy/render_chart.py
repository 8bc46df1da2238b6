"""Prints what Helm makes of a chart: run with the environment that has Helm.

render_chart.py CHART VALUES.json       the manifests, or why there are none
render_chart.py CHART --lint CONFIG     what Helm finds wrong with the chart
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python  # type: ignore[import-not-found]  # it is in .venv-deploy alone

_WARNING = 2


def lint_chart(chart: str, values: dict[str, Any]) -> str:
    """What is worse than a hint, such as that an icon is missing."""
    messages = helm_python.lint(chart, values)["messages"]
    return "\n".join(one["error"] for one in messages if one["severity"] >= _WARNING)


def render_chart(chart: str, values: dict[str, Any]) -> str:
    """Every manifest, without the notes."""
    with helm_python.Chart.load(chart) as loaded:
        manifests = loaded.render(values, name="interlingua", namespace="models")
    return "\n---\n".join(text for name, text in manifests.items() if name.endswith(".yaml"))


def main(chart: str, *action: str) -> None:
    """What was asked for, on standard output; a complaint on the other."""
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
