"""Probes of a worker: which features of its protocol it really supports.

client        sends requests as a pool does; what a probe is
basic         probes: availability, responses and their usage, messages and texts, embeddings
stopping      probes: finish reasons, token limits and stop strings; sampling, choices and prompts
structured    probes: structured output, tool calls, log probabilities, reasoning
errors        probes: invalid requests
concurrency   probes: connections, concurrent requests, clients that disconnect
runner        runs them
report        the results as a table, as JSON, and as a pool's unsupported_parameters
"""
