"""Subjects and consumer groups deleted: brokers drop partitions and forget groups, then the rows
go.
"""
