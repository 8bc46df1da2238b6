"""What the gateway does at an endpoint, by the endpoint's task.

registry          the table: task to handler
generation        a model answers (``generate``), also from stored responses
token_counts      a model counts tokens (``tokenize``), or the gateway estimates them
stored_responses  a stored response is sent or removed (``recall``); what requests refer to
information       the gateway answers from its catalog (``inform``)
cancellation      a running request of the caller is cancelled (``stop``)
forwarding        a worker gets the request as it is (``proxy``)
"""
