"""The first ten steps of the schema."""
