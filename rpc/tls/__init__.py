"""TLS of servers and clients: settings, contexts, and what a failed handshake means."""
