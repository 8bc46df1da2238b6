"""Collecting tests is cheap: only those of the local engine import torch."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import pytest_make_collect_report


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize(
    ("path", "outcome"), [("unit/test_new.py", "failed"), ("unit/torch/test_new.py", "passed")]
)
def test_only_tests_of_the_local_engine_may_import_torch_when_collected(
    package: str,
    path: str,
    outcome: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = pytest.Module.from_parent(request.session, path=Path(__file__).parent / path)
    monkeypatch.delitem(sys.modules, package, raising=False)

    collect = pytest_make_collect_report(module)
    next(collect)
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    with pytest.raises(StopIteration) as end:
        collect.send(pytest.CollectReport(module.nodeid, "passed", None, []))

    assert end.value.value.outcome == outcome
