"""The metaserver: which brokers and subjects there are, and which session owns which partition."""
