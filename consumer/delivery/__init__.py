"""Messages as consumers have them: decoded, and acked by hand."""
