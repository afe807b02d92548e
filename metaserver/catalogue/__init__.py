"""Handles the calls about brokers and subjects: reports, creations, accepted copies and routes."""
