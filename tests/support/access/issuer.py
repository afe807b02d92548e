"""An outside issuer of tokens (JWT) for tests: keys, their public parts in a file, and signed
claims.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "keylane"
MAKERS: dict[str, Any] = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65_537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}
WRITERS: dict[str, Any] = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}


class OutsideIssuer:
    """Its public keys are in `file`; `publish` writes them again."""

    def __init__(self, file: Path, **keys: str) -> None:
        """`keys`: id → algorithm."""
        self.file = file
        self.algorithms = dict(keys or {"one": "RS256"})
        self.keys = {kid: MAKERS[name]() for kid, name in self.algorithms.items()}
        self.publish()

    def add(self, kid: str, algorithm: str = "RS256") -> None:
        self.algorithms[kid] = algorithm
        self.keys[kid] = MAKERS[algorithm]()

    def document(self, *kids: str) -> dict[str, Any]:
        """The JWKS of all keys, or of these."""
        return {
            "keys": [
                json.loads(WRITERS[self.algorithms[kid]].to_jwk(self.keys[kid].public_key()))
                | {"kid": kid, "use": "sig"}
                for kid in kids or self.keys
            ]
        }

    def publish(self, *kids: str) -> None:
        self.file.write_text(json.dumps(self.document(*kids)))

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": now + 600, "iat": now}
        return {key: value for key, value in (claims | changes).items() if value is not None}

    def token(
        self, kid: str = "one", *, header: dict[str, Any] | None = None, **changes: Any
    ) -> str:
        """A signed token; None as a claim leaves it out."""
        return jwt.encode(
            self.claims(**changes),
            self.keys[kid],
            algorithm=self.algorithms[kid],
            headers={"kid": kid} | (header or {}),
        )

    def public_pem(self, kid: str = "one") -> bytes:
        public = self.keys[kid].public_key()
        return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def forged(self, header: dict[str, Any], secret: bytes | None = None, **changes: Any) -> str:
        """A token with any header, signed with a secret (HS256), or not at all."""
        parts = [_packed(header), _packed(self.claims(**changes))]
        signed = ".".join(parts).encode()
        mark = b"" if secret is None else hmac.new(secret, signed, hashlib.sha256).digest()
        return ".".join([*parts, _text(mark)])


def _packed(value: dict[str, Any]) -> str:
    return _text(json.dumps(value).encode())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
