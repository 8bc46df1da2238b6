"""The page on threats is complete, and each row names its test."""

import re

from tests.docs.named import ROOT, find_missing_tests, find_test_references, parse_table

PAGE = (ROOT / "docs" / "threats.md").read_text("utf-8")
FAULTS = {
    "LiteLLM 1.82.7, 1.82.8",
    "CVE-2026-42208 LiteLLM",
    "CVE-2026-42271 LiteLLM",
    "CVE-2026-47101, CVE-2026-47102, CVE-2026-40217 LiteLLM",
    "CVE-2024-6587 LiteLLM",
    "CVE-2025-69228, CVE-2025-69229 aiohttp",
    "CVE-2025-53643, GHSA-45c4, GHSA-pjjw, GHSA-gfw2 aiohttp",
    "CVE-2026-22815, CVE-2026-34516, CVE-2026-34519, CVE-2026-34525 aiohttp",
    "aiohttp 3.13.3, 3.14",
    "CVE-2025-48956 vLLM",
    "CVE-2025-59425 vLLM",
    "CVE-2026-22778 vLLM",
    "CVE-2026-24779 vLLM",
    "CVE-2026-5497 vLLM",
    "CVE-2025-23310, CVE-2025-23311 Triton",
    "CVE-2025-23319, CVE-2025-23320, CVE-2025-23334 Triton",
    "CVE-2025-33201, CVE-2026-24173 Triton",
    "CVE-2026-48710 Starlette",
    "CVE-2025-8671, slow clients",
}
ROWS = {
    fault: rest
    for fault, *rest in parse_table(PAGE, "## Published vulnerabilities of similar software")
}


def test_every_fault_has_a_threat_row() -> None:
    assert ROWS.keys() == FAULTS


def test_every_threat_names_an_existing_test() -> None:
    assert [fault for fault, (*_, named) in ROWS.items() if not find_test_references(named)] == []
    assert find_missing_tests(PAGE) == []


def test_missing_test_reference_is_detected() -> None:
    assert find_missing_tests("`tests/docs/named.py::test_nothing` `tests/none.py::test_it`") == [
        "tests/docs/named.py::test_nothing",
        "tests/none.py::test_it",
    ]


def test_minimum_aiohttp_version_excludes_vulnerable_releases() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    [minimum] = re.findall(r'"aiohttp>=([\d.]+)"', text)
    assert tuple(map(int, minimum.split("."))) >= (3, 14)
