"""The base of a simulated cluster: an event loop in virtual time, machines, a network, disks, a
database.
"""
