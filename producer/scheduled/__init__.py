"""Messages for a later delivery: they are sent to brokers that keep them, and canceled there."""
