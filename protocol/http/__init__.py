"""The plain HTTP interface: posted messages, idempotency keys and the OpenAPI document."""
