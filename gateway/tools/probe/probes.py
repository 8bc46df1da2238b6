"""All probes, in the order in which they are run."""

from typing import Final

from gateway.conformance.worker import (
    asking,
    ending,
    forms,
    mistakes,
    sampling,
    texts,
    traffic,
    vectors,
)

PROBES: Final = (
    *asking.PROBES,
    *ending.PROBES,
    *sampling.PROBES,
    *texts.PROBES,
    *forms.PROBES,
    *mistakes.PROBES,
    *traffic.PROBES,
    *vectors.PROBES,
)
