"""The work of a session on a partition that it owns: messages are pulled, read and acked."""
