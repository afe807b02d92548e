"""The part of the contract for plain HTTP: posted messages, idempotency keys, the OpenAPI
document.
"""
