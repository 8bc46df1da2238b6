"""Looking on while a request is served that is to be explained.

account   what is told: the Structs of an explanation
telling   each part of it, of what serving made of the request
watch     is told by the server and the backends, and tells of it at any time
kept      who may have requests explained, and the last that were
question  what may be asked of a request that nobody sent
"""
