"""Which model, version and target a request goes to.

router              models, aliases, versions; a request to its route
paths               URL paths to protocol endpoints
rules               rules that match headers, body fields, keys and shares
traffic_split       weights over versions; sticky assignment by rendezvous hashing
fallback            which errors allow a fallback, and the history of the targets tried
requirements        features that a request needs and a fallback target must have
request_attributes  what rules and sticky assignment can look at
"""
