"""Deletes subjects and consumer groups: brokers drop partitions and forget groups, and then the
rows are deleted.
"""
