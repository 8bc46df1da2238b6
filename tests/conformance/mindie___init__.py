"""MindIE: cases MI-01 to MI-50. The server has its paths to itself, below one prefix or none.

Beside the models of all dialects it serves ``mock-long``, whose answer has more than 20 tokens.
Cases of the profile rc1 are played where that profile is mounted, all others against 2x. Endpoints
that name no model are given one in the body, where MindIE would pass it over.
"""

from gateway.conformance.mindie.answers import ANSWERS
from gateway.conformance.mindie.parameters import PARAMETERS
from gateway.conformance.mindie.refusals import REFUSALS
from gateway.conformance.mindie.talks import TALKS

__all__ = ["CASES"]

CASES = (*ANSWERS, *REFUSALS, *PARAMETERS, *TALKS)
