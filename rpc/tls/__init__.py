"""TLS for servers and clients: settings, contexts, and explanations of failed handshakes."""
