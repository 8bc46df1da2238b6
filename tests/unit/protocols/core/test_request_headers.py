"""Of the headers of a request, workers of its protocol get those that its table forwards."""

from protocols.core.request_headers import RequestHeaders
from protocols.databricks.params import REQUEST_HEADERS as DATABRICKS

TABLE = RequestHeaders(
    ("own-",), {"own-sent": "forwarded", "own-seen": "handled", "own-lost": "reported"}
)


def test_only_forwarded_headers_with_a_printable_value_are_selected() -> None:
    headers = {"accept": "*/*", "own-sent": "a, b", "own-lost": "1", "own-seen": "1"}

    assert TABLE.select_forwarded(headers) == (("own-sent", "a, b"),)
    for value in ("", "a\tb", "é", "x" * 2049):
        assert TABLE.select_forwarded({**headers, "own-sent": value}) == ()


def test_nothing_is_selected_of_headers_that_no_table_forwards() -> None:
    assert TABLE.select_forwarded({"accept": "*/*", "own-lost": "1"}) == ()
    assert RequestHeaders().select_forwarded({"own-sent": "1"}) == ()


def test_headers_of_the_protocol_that_no_table_lists_are_meaningful() -> None:
    headers = ["accept", "own-sent", "own-seen", "own-lost", "own-new"]

    for _ in range(2):  # a name that was seen before means the same
        meaningful = [*filter(TABLE.has_meaning, headers)]
        assert meaningful == ["own-sent", "own-lost", "own-new"]


def test_credentials_of_azure_databricks_are_the_gateway_s_own_matter() -> None:
    names = ("X-Databricks-Azure-SP-Management-Token", "X-Databricks-Azure-Workspace-Resource-Id")

    assert not any(DATABRICKS.has_meaning(name.lower()) for name in names)
