"""WebSockets of the data plane, whose bytes are not copied on their way."""
