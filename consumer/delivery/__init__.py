"""Messages at consumers: decoded, and acked by hand."""
