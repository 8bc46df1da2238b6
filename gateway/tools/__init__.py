"""Commands that serve no request. The server imports nothing of this."""
