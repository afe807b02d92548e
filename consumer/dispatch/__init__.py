"""Runs what partition sessions hand out: handlers of one message."""
