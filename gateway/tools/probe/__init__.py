"""Probes of a worker: which of the things that its protocol promises it really does.

client        sends requests as a pool would; what a probe is
basic         probes: availability, responses and their usage, messages and texts, embeddings
stopping      probes: finish reasons, token limits and stop strings; sampling, choices and prompts
structured    probes: structured output, tool calls, log probabilities, reasoning
errors        probes: invalid requests
concurrency   probes: connections, concurrent requests, clients that disconnect
runner        runs them
report        the results as a table, as JSON, and as a pool's unsupported_parameters
"""
