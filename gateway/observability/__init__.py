"""What is recorded of requests: metrics, access log, usage rows, traces.

record             the record of one request
recording          recordings of requests with their responses: the format and its reader
recording_writer   writes them: redaction, encoding, the queue
recording_folder   their files: rotation, compression, retention
redaction          replaces personal data and secrets in them
stats              counters and histograms per model, version and traffic split
access_log         one line per request, in JSON or text
log_rate           limits how often a message is logged
background_writer  a thread with a bounded queue: no response waits for a write
usage              usage rows in SQLite, and their totals
usage_postgres     the same in PostgreSQL
tracing            OpenTelemetry spans: sampling, attributes
otel_metrics       the gen_ai.* metrics for OpenTelemetry
otlp               export of both with the OpenTelemetry SDK
semconv            names of the semantic conventions, per version
prometheus_text    the Prometheus text format, read
metrics/           the collectors behind /metrics
"""
