"""``record`` in a configuration: its defaults, and errors with their lines."""

from pathlib import Path
from typing import Final

import pytest

from gateway.config.errors import ConfigError
from gateway.config.loader import load_text

CONFIG: Final = """\
backends: {{e: {{kind: echo}}}}
defaults: {{record: {defaults}}}
models: {{m: {{backend: e, record: {model}}}}}
routes: [{{name: r, to: {{model: m}}, record: {route}}}]
"""


def load(tmp_path: Path, **records: str) -> object:
    to = f"{{to: {tmp_path}/rec}}"
    texts = {"defaults": to, "model": to, "route": to} | records
    text = CONFIG.format(**{name: one.replace("TO", str(tmp_path)) for name, one in texts.items()})
    return load_text(text, "test.yaml", env={})


def get_issues(tmp_path: Path, **records: str) -> list[str]:
    with pytest.raises(ConfigError) as excinfo:
        load(tmp_path, **records)
    return [f"{issue.line} {issue.path} {issue.message}" for issue in excinfo.value.issues]


def test_defaults_redact_everything_that_is_known(tmp_path: Path) -> None:
    """A folder is the only required setting; the defaults are the safe ones."""
    record = load_text(
        f"backends: {{e: {{kind: echo}}}}\nmodels: {{m: {{backend: e, record: {tmp_path}/rec}}}}\n",
        "test.yaml",
        env={},
    ).models["m"].record  # fmt: skip

    assert record is not None
    assert (record.to, record.share, record.bodies) == (f"{tmp_path}/rec", 1.0, "redacted")
    assert (record.retention, record.size) == (7 * 86400, 1 << 30)
    assert len(record.redact.builtin) == 8


def test_patterns_must_be_regular_expressions(tmp_path: Path) -> None:
    """A pattern that matches the empty text is rejected: it would match everywhere."""
    broken, empty = get_issues(
        tmp_path, model='{to: TO/rec, redact: {patterns: {a: "(", b: "x*", c: "x"}}}'
    )
    assert broken.startswith("3 models.m.record.redact.patterns.a '(' is no regular expression: ")
    assert empty == (
        "3 models.m.record.redact.patterns.b 'x*' matches the empty string, so it would match "
        "everywhere"
    )


def test_redaction_needs_bodies_to_redact(tmp_path: Path) -> None:
    """Full bodies are not redacted, so ``redact`` with them is a mistake."""
    [issue] = get_issues(tmp_path, route="{to: TO/rec, bodies: full, redact: {fields: [a]}}")
    assert issue == (
        "4 routes[0].record.redact bodies are full, so nothing is redacted; write bodies: redacted"
    )


def test_a_folder_has_one_limit(tmp_path: Path) -> None:
    """Models and routes may share a folder, with or without a slash at its end."""
    load(tmp_path, model="{to: TO/rec/, share: 5%}")
    load(tmp_path, model="{to: TO/other, size: 1MiB}")
    [issue] = get_issues(tmp_path, model="{to: TO/rec/, size: 1MiB}")

    assert issue == (
        "3 models.m.record.size another model or route records to this folder with another limit; "
        "write the same, or another folder"
    )

    [issue] = get_issues(tmp_path, route="{to: TO/rec, retention: 1d}")
    assert issue.startswith("4 routes[0].record.retention another model or route")


def test_folder_must_be_one_or_be_in_one(tmp_path: Path) -> None:
    """A missing folder is created if its parent exists."""
    (tmp_path / "file").touch()
    for to in ("file", "none/rec"):
        [issue] = get_issues(tmp_path, model=f"{{to: TO/{to}}}")
        assert "is not a folder, or a new one in an existing folder" in issue
