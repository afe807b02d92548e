"""Deletes subjects and consumer groups: brokers drop partitions and forget groups, then the rows
are deleted.
"""
