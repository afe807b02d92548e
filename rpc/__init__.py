"""Control calls, data-plane channels and servers, at both ends, on aiohttp. No other room imports
aiohttp.
"""
