"""One file for each step of the schema; the first ten are in a folder of their own."""
