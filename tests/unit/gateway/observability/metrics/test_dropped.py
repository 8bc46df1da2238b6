from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.metrics.dropped import DroppedRecordCollector


def test_dropped_record_counters_are_exported() -> None:
    registry = CollectorRegistry()
    registry.register(DroppedRecordCollector({"log_lines": lambda: 3, "usage_rows": int}))

    page = generate_latest(registry).decode().splitlines()

    assert [line for line in page if not line.startswith("#")] == [
        "interlingua_log_lines_dropped_total 3.0",
        "interlingua_usage_rows_dropped_total 0.0",
    ]
