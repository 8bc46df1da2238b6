"""MindIE: Huawei's inference server for Ascend, in three releases.

dialect    the paths, and which module answers for each
profiles   the releases
prompts    requests of text; tokens: of ids; inputs: after TGI and vLLM; chat, messages: OpenAI's
requests   what all requests share; tables: their parameters; checks: the order and words of checks
texts      answers of text and ids; pieces: after TGI and vLLM; chunks: OpenAI's
errors     statuses and bodies
worker     requests for workers; takes: what a release takes; fitting: what is taken away for it
relay      a client's own bytes for a worker
decoder    workers' answers; incoming: their shapes; faults: their errors
info       what the server tells of itself; tokenizer: of a text
"""

from protocols.mindie.endpoints import MindIE

__all__ = ["MindIE"]
