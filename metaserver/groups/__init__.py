"""Consumer groups: their sessions, and which session has the lease of which partition."""
