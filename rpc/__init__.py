"""Clients and servers of control calls and of the data plane, on aiohttp, which no other package
imports.
"""
