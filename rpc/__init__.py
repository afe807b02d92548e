"""aiohttp, both ends: control calls, data-plane channels, serving.  The only room that knows
aiohttp.
"""
