"""Clients and servers for control calls and the data plane, built on aiohttp, which no other
package imports.
"""
