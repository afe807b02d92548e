"""Sends the rows of Arrow data, by column."""
