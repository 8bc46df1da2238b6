"""MindIE: Huawei's inference server for Ascend, in three releases.

endpoints   what clients call: routes, the adapter, state and tokenizer responses
params      parameter tables, in the order of the server's checks; profiles (releases); the config
requests    client bodies to the internal request: text, token ids, TGI style, vLLM style, chat
messages    chat messages and their media parts
responses   events to responses: text, token ids, TGI style, vLLM style, chat and completions
errors      our errors to MindIE bodies; worker errors to ours
upstream    the internal request to a worker's request; unsupported parameters; pass-through
decoder     worker responses to events
openapi     schemas of requests and responses
"""

from protocols.mindie.endpoints import MindIE

__all__ = ["MindIE"]
