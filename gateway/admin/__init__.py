"""The admin listener: is the gateway alive, how is it, what runs in it, and what may be changed.

GET     /-/live                         200 for as long as the process answers
GET     /-/ready                        503 while it drains, or while nobody could answer
GET     /metrics                        what all exchanges came to, for Prometheus
GET     /-/status                       models, stats, workers, build: see ``status``
GET     /-/config                       what is served, its secrets masked, and what its file holds
GET     /-/requests                     the exchanges that run: never a word of them
POST    /-/requests/{id}/cancel         200 with ``{"cancelled"}``, how many have this id; 404
POST    /-/drain                        readiness fails from now on, and what comes is served
DELETE  /-/drain                        and not any more
GET     /-/workers                      what is known of each backend's workers
POST    /-/workers                      ``{"backend", "url", "weight"?, "max_concurrency"?}``
DELETE  /-/workers?backend=B&url=U
POST    /-/reload                       200 with the new ``{"hash"}``; 422 with ``{"issues"}``
POST    /-/explain                      what would become of a request; its body is a Question
GET     /-/explain/{id}                 what became of one of the last that asked to be explained
ANY     /-/playground/{listener}/{path} a listener's own answer; it is named by its place, from 0
GET     /-/ui/                          the page for people; ``/`` leads there

What it refuses it tells as ``{"error": {"message": "...", "field": "..." or null}}``. The first two
tell nothing and are open to all, as the page is before it asks for something; for everything else
the key is asked for before anything is read.

ports      what stands behind it         listener   its paths, and what stands before them
answers    its answers and refusals      workers    workers by hand
overview   how the gateway is            status     that as JSON, and several processes' as one's
window     figures of the last minute    playing    a listener's answer, by way of this one
page       the page's files
"""

from gateway.admin.api import AdminServer, AdminServices, WorkerSet, get_unready_reason
from gateway.admin.status import RecentStats, StatusReporter

__all__ = [
    "AdminServer",
    "AdminServices",
    "RecentStats",
    "StatusReporter",
    "WorkerSet",
    "get_unready_reason",
]
