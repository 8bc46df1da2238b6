"""The gateway conforms to the types of OpenAI's client, without server errors."""

import pytest

from tests.conftest import RunningGateway
from tests.schema.openai_types import LIMITS, build_document
from tests.schema.schemathesis_run import Finding, run_schemathesis

pytestmark = pytest.mark.slow

EXAMPLES = 100
ANSWERED = 0.3
"""The minimum share of successful responses: a run with only errors shows nothing."""


def explain_accepted_finding(finding: Finding) -> str:
    """Return why a finding is intended, or ""."""
    if finding.operation == "POST /v1/embeddings" and 'is not of type "array"' in finding.why:
        return "the client's types know vectors as numbers only, not as the base64 it asks for"
    return ""


async def test_responses_match_the_openai_client_types(mock: RunningGateway) -> None:
    models = dict.fromkeys(LIMITS, "mock")

    report = await run_schemathesis(build_document(models), mock.url, examples=EXAMPLES)

    assert [finding for finding in report.findings if not explain_accepted_finding(finding)] == []
    assert {explain_accepted_finding(finding) for finding in report.findings} != {""}
    for path in LIMITS:
        assert report.accepted(f"POST {path}") > ANSWERED, (path, report.statuses)
    assert not [record for record in mock.records if record.outcome == "gateway_error"]
