"""What the engine has done so far, in figures."""

from dataclasses import dataclass

from backends.torch.kv import Pool
from backends.torch.spec import Figures, Finished


@dataclass(slots=True)
class Tally:
    """Counted as it happens; see ``spec.Figures``."""

    steps: int = 0
    seconds: float = 0.0
    batch: int = 0
    read: int = 0
    made: int = 0
    found: int = 0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def step(self, seconds: float, *, read: int, made: int, batch: int) -> None:
        """A step was made, with so many tokens read and made for ``batch`` rows and prompts."""
        self.steps += 1
        self.seconds += seconds
        self.read += read
        self.made += made
        self.batch = batch

    def finish(self, told: Finished) -> None:
        """A request is done."""
        self.found += told.cached
        self.queue += told.queue
        self.prefill += told.prefill
        self.decode += told.decode

    def figures(self, pool: Pool, preempted: int) -> Figures:
        """As they are told."""
        return Figures(
            pool.blocks,
            pool.used,
            preempted,
            self.steps,
            self.seconds,
            self.batch,
            self.read,
            self.made,
            self.found,
            self.queue,
            self.prefill,
            self.decode,
        )
