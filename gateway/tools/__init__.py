"""Commands that serve no request: they load when they are called."""
