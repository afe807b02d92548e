"""Rows of Arrow data, sent by column."""
