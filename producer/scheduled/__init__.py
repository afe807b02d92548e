"""Messages for a later delivery: sent to brokers that keep them, and canceled there."""
