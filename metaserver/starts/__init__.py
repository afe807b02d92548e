"""The starts of new consumer groups."""
