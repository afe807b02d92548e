"""What plain HTTP adds to the contract: posted messages, idempotency keys, the OpenAPI document."""
