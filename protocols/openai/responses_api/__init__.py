"""OpenAI's Responses API, beside chat completions.

tools      tools, tool_choice, and the names under which workers see them
items      input items, as messages of the internal request
requests   client JSON to the internal request
responses  events to client JSON and SSE
state      stored responses: references to them, and the endpoints that read them
upstream   internal request to a worker's request, unsupported parameters, pass-through
decoder    a worker's bytes to events
openapi    the schemas of requests and responses

Source: OpenAI's published specification; the types of openai-python 3.54; the behaviour of Codex
CLI 0.169, openai-agents 0.24 and vLLM 0.32.
"""
