"""Ed25519 signatures: metaservers sign capabilities, and clients sign a broker's challenge.

Private keys are generated in the process that uses them and never leave it; only public keys are
stored and sent.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from ...protocol.access.capability import (
    CONTEXT,
    Capability,
    capability_text,
    encode_capability,
    proof_bytes,
)


class OwnKey:
    """A private key that was generated for this object."""

    def __init__(self) -> None:
        self._private = Ed25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        """The public key, 32 bytes long."""
        self.key_id = hashlib.sha256(self.public).hexdigest()[:16]

    def sign(self, capability: Capability) -> str:
        """Return the signed text of a capability; its `key` must be this key's id."""
        packed = encode_capability(capability)
        return capability_text(packed, self._private.sign(CONTEXT + packed))

    def sign_challenge(self, nonce: bytes, address: str) -> bytes:
        """Return the signature of a challenge from the broker that was called at `address`."""
        return self._private.sign(proof_bytes(nonce, address))


def is_signed(public: bytes, signature: bytes, packed: bytes) -> bool:
    """Return True if `signature` is a signature of the packed capability by this public key."""
    return _verifies(public, signature, CONTEXT + packed)


def is_proof(public: bytes, proof: bytes, nonce: bytes, address: str) -> bool:
    """Return True if `proof` is a signature of the challenge by this public key."""
    return _verifies(public, proof, proof_bytes(nonce, address))


def _verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
