"""The life of a request, in order.

http        the interfaces of an HTTP request and of its response writer
handler     match the endpoint, authenticate, read the body, route, apply limits
dispatcher  send the request to its target; on failure try the fallback targets
strategies  how a target serves a request: by pass-through, or by translation
responder   run one target's events into the client's response
shadow      mirror requests to another version and compare the responses
"""
