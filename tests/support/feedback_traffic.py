"""Writes usage rows and feedback of scripted traffic with the real recorder."""

import random
from collections.abc import Mapping
from pathlib import Path

from gateway.observability.record import Feedback, RequestRecord
from gateway.observability.usage import SqliteUsageRecorder
from protocols.core.events import Usage


def write_traffic(
    file: Path, count: int, shares: Mapping[str, float], *, users: int = 0, seed: int = 1
) -> None:
    """Write requests to two versions; ``shares`` is each version's share of thumbs up."""
    rng, recorder = (
        random.Random(seed),
        SqliteUsageRecorder(str(file), 1e12, lambda: 2e6, feedback=True),
    )
    for n in range(count):
        user = rng.randrange(users) if users else 0
        version = str(1 + (user % 2 if users else rng.randrange(2)))
        record = RequestRecord(
            f"r{n}",
            1e6 + n,
            protocol=("openai", "anthropic")[n % 2],
            model="chat",
            version=version,
            split="rollout",
            key=f"key{n % 2}",
            outcome="ok",
            usage=Usage(3, 5),
            duration=rng.expovariate(1.0),
            response_id=f"msg_r{n}",
            user_hash=f"{user:013x}" if users else "",
        )
        up = float(rng.random() < shares[version])
        at = 1e6 + n + 0.5
        recorder.record_usage(record)
        recorder.record_feedback(
            Feedback(at, record.key, False, "id", record.id, "thumbs_up", "boolean", up)
        )
        recorder.record_feedback(
            Feedback(
                at, record.key, False, "id", record.id, "why", "category", None, f"reason{int(up)}"
            )
        )
        if n % 2000 == 1999:  # the queue's capacity
            _flush(recorder)
    recorder.start()
    recorder.close(60)
    assert recorder.count_dropped() == 0


def _flush(recorder: SqliteUsageRecorder) -> None:
    writer = recorder._writer
    batch = [writer._waiting.popleft() for _ in range(len(writer._waiting))]
    assert recorder._write_batch(batch) == 0
