"""OpenAI's API as its own client has it: no server error, and no answer that breaks its types."""

import pytest

from tests.conftest import Running
from tests.schema.openai_types import LIMITS, document
from tests.schema.survey import Finding, survey

pytestmark = pytest.mark.slow

EXAMPLES = 100
ANSWERED = 0.3
"""The least share of answers to the requests drawn: a survey of refusals shows nothing."""


def accepted(finding: Finding) -> str:
    """Why a finding is none; "" where it is one."""
    if finding.operation == "POST /v1/embeddings" and 'is not of type "array"' in finding.why:
        return "the client's types know vectors as numbers only, not as the base64 it asks for"
    return ""


async def test_the_types_of_the_client_hold(mock: Running) -> None:
    models = dict.fromkeys(LIMITS, "mock")

    found = await survey(document(models), mock.url, examples=EXAMPLES)

    assert [finding for finding in found.findings if not accepted(finding)] == []
    assert {accepted(finding) for finding in found.findings} != {""}
    for path in LIMITS:
        assert found.accepted(f"POST {path}") > ANSWERED, (path, found.statuses)
    assert not [record for record in mock.records if record.outcome == "gateway_error"]
