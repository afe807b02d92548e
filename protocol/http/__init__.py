"""The plain HTTP interface: posted messages, idempotency keys, the OpenAPI document."""
