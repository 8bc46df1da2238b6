"""What the protocols with OpenAI-like chat requests share.

params           parameter tables, and readers of JSON fields with their error texts
messages         messages, read and written
content_parts    their content parts
tools            tools, tool_choice, functions
field_types      types of fields that may be passed through
response_format  guided decoding and structured output fields
requests         client JSON to the internal request
responses        events to JSON and SSE
embeddings       embedding responses, both ways
decoder          worker responses to events
errors           error bodies for clients
worker_errors    error bodies of workers
upstream         requests to workers, worker profiles, unsupported parameters
openapi          schemas of requests and responses
"""
