"""Handles calls about brokers and subjects: reports, creations, accepted folder copies and
routes.
"""
