"""Pages in the Prometheus text format are parsed and written."""

import pytest

from gateway.observability.prometheus_text import format_families, parse_families, parse_labels

PAGE = """\
# HELP r_total Requests.
# TYPE r_total counter
r_total{model="a b",path="x} 1"} 3.0
r_total{model="c\\"\\n",path=""} 1e+06
# HELP d_seconds Duration.
# TYPE d_seconds histogram
d_seconds_bucket{le="+Inf"} 2.0
d_seconds_sum 0.5
"""


def test_parsed_page_is_formatted_unchanged() -> None:
    families = parse_families(PAGE)
    assert {name: family.type for name, family in families.items()} == {
        "r_total": "counter",
        "d_seconds": "histogram",
    }
    assert families["d_seconds"].samples == {'d_seconds_bucket{le="+Inf"}': 2, "d_seconds_sum": 0.5}
    assert format_families(families.values()) == PAGE.replace("1e+06", "1000000.0")


def test_labels_are_unescaped() -> None:
    samples = [*parse_families(PAGE)["r_total"].samples]
    assert parse_labels(samples[0]) == ("r_total", {"model": "a b", "path": "x} 1"})
    assert parse_labels(samples[1]) == ("r_total", {"model": 'c"\n', "path": ""})
    assert parse_labels("d_seconds_sum") == ("d_seconds_sum", {})


def test_sample_without_comments_is_an_untyped_metric() -> None:
    families = parse_families("# other\n# HELP a A.\n# TYPE a gauge\na 1\nb_sum 2 1700000000\n\n")
    assert families["a"].samples == {"a": 1.0}
    assert (families["b_sum"].type, families["b_sum"].samples) == ("untyped", {"b_sum": 2.0})


@pytest.mark.parametrize("line", ["x", "x{ 1", "x one", 'x{a="b" 1', "x 1 2 3", "0x 1"])
def test_malformed_sample_line_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a sample|could not convert"):
        parse_families(f"{line}\n")


def test_malformed_labels_are_rejected() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        parse_labels('x{a="b,c="d"}')
