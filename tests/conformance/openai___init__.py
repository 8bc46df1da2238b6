"""OpenAI: cases W1 to W83.

shapes      what the requests and the answers are made of
talks       conversations, answered whole: W1 to W40
refusals    whatever is wrong with the request, its key, its path or the worker: W41 to W54
streams     conversations, streamed: W55 to W63
texts       completions, embeddings and the list of models: W64 to W83
"""

from gateway.conformance.openai.refusals import CASES as REFUSALS
from gateway.conformance.openai.streams import CASES as STREAMS
from gateway.conformance.openai.talks import CASES as TALKS
from gateway.conformance.openai.texts import CASES as TEXTS

CASES = (*TALKS, *REFUSALS, *STREAMS, *TEXTS)
