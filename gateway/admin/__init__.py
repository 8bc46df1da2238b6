"""The admin listener: health, metrics, status and changes at runtime.

GET     /-/live                         200 as long as the process responds
GET     /-/ready                        503 while the gateway drains or no backend is ready
GET     /metrics                        the metrics for Prometheus
GET     /-/status                       models, statistics, workers, build: see ``status``
GET     /-/history                      the last 15 minutes of each version: see ``history``
GET     /-/usage                        sums of requests and tokens; ``?days=30&by=key,model``
GET     /-/usage/history                6 hours or 7 days of each version; ``?range=6h|7d``
GET     /-/config                       the configuration with masked secrets, and its file's state
GET     /-/requests                     the running requests, without their content
GET     /-/requests/finished            the records of the last 200 finished requests
POST    /-/requests/{id}/cancel         200 with ``{"cancelled"}``, the number of requests; 404
POST    /-/drain                        readiness fails; requests are still served
DELETE  /-/drain                        stop draining
GET     /-/workers                      the state of each backend's workers
POST    /-/workers                      ``{"backend", "url", "weight"?, "max_concurrency"?}``
DELETE  /-/workers?backend=B&url=U
POST    /-/reload                       200 with the new ``{"hash"}``; 422 with ``{"issues"}``
POST    /-/explain                      dry run of a request; the body is an ExplainRequest
GET     /-/explain/{id}                 the explanation of a recent request; ``?format=text``
ANY     /-/playground/{listener}/{path} forwards to a listener; ``listener`` is its index
GET     /-/ui/                          the web UI; ``/`` redirects there

Errors are ``{"error": {"message": "...", "field": "..." or null}}``. The first two paths and the
files of the web UI are open; for all others the key is checked before the body is read.

api          paths, authentication, and the handlers of each path
http         bodies and errors
services     what the admin API needs of the gateway
web_ui       the files of the web UI, and the playground
status       the status as JSON, and the merged status of several processes
history      statistics of the last 15 minutes
usage        sums and history of the recorded usage, also as CSV
config_view  the configuration as it was written, with masked secrets
static/      the files of the web UI
"""

from gateway.admin.api import AdminServer
from gateway.admin.services import AdminServices, WorkerSet, get_unready_reason
from gateway.admin.status import StatusReporter

__all__ = [
    "AdminServer",
    "AdminServices",
    "StatusReporter",
    "WorkerSet",
    "get_unready_reason",
]
