"""A server's operational parts: metrics, health, logs, and settings that are reloaded at SIGHUP."""
