"""Triton Inference Server's HTTP protocol: generate both ways, and infer towards clients.

dialect       the paths, and the class that is registered
vocabulary    what the models of each profile take and tell: the tables
generate      reading a body of generate       infer         reading a body of infer
tensors       inputs held against the model    binary        inputs and outputs as raw bytes
meaning       inputs to the internal request   guided        output formats
answer        writing generate                 infer_answer  writing infer
measures      what is told beside the text     wire          how the original prints
models        the endpoints that inform        refusal       errors
document      JSON in order                    careful       JSON as the original's parser takes it
faults        the original's sentences

Towards workers:
worker        requests, and what they can't carry
plan          a request held against a model    learning      what a model's configuration tells
decoder       reading streams and answers       incoming      what one object of an answer holds
failures      what a worker's error means
relay         a client's own bytes for a worker    passage   and the worker's own bytes back
"""

from protocols.triton.endpoints import Triton

__all__ = ["Triton"]
