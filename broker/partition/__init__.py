"""The state of a hosted partition, and the decisions about it. Pure: it imports the protocol
only.
"""
