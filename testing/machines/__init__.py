"""What a simulated cluster runs on: an event loop in virtual time, machines, a network, disks, a
database.
"""
