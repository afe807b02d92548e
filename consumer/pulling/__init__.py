"""Messages pulled, read and acked: what a session does with a partition that it owns."""
