"""The calls about brokers and subjects: reports, creations, accepted copies, routes."""
