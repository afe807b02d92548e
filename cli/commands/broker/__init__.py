"""`keylane broker`: broker groups known to the metaserver, and the data folders of stopped
brokers.
"""
