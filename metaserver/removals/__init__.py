"""Deletes subjects and consumer groups: brokers drop partitions and forget groups, after which the
rows are deleted.
"""
