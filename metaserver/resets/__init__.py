"""A consumer group's progress set by an operator."""
