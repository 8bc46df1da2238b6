"""What the engine has done so far, in figures."""

from dataclasses import dataclass

from backends.torch.kv import BlockPool
from backends.torch.spec import EngineStats, RequestFinishedEvent


@dataclass(slots=True)
class EngineCounters:
    """Counted as it happens; see ``spec.Figures``."""

    steps: int = 0
    seconds: float = 0.0
    batched_sequences: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record_step(self, seconds: float, *, read: int, made: int, batch: int) -> None:
        """A step was made, with so many tokens read and made for ``batch`` rows and prompts."""
        self.steps += 1
        self.seconds += seconds
        self.prompt_tokens += read
        self.completion_tokens += made
        self.batched_sequences = batch

    def record_finished(self, told: RequestFinishedEvent) -> None:
        """A request is done."""
        self.cached_tokens += told.cached_tokens
        self.queue_seconds += told.queue_seconds
        self.prefill_seconds += told.prefill_seconds
        self.decode_seconds += told.decode_seconds

    def make_stats(self, pool: BlockPool, preempted: int) -> EngineStats:
        """As they are told."""
        return EngineStats(
            pool.blocks,
            pool.used_blocks,
            preempted,
            self.steps,
            self.seconds,
            self.batched_sequences,
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self.queue_seconds,
            self.prefill_seconds,
            self.decode_seconds,
        )
