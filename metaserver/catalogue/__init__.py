"""Handles calls for brokers and subjects: reports, creations, accepted folder copies and routes."""
