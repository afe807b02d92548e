"""The building blocks of a simulated cluster: an event loop in virtual time, machines, a network,
disks, and a database.
"""
