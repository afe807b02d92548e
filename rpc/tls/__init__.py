"""TLS of servers and clients: settings, contexts, and explanations of failed handshakes."""
