"""The second ten steps of the schema, as far as there are such."""
