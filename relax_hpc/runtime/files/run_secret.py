"""Derives every key and token of a run from one secret file that only its owner can read.

So no record holds a token, and a key for one purpose reveals nothing about another.
"""

import hashlib
import hmac
import os
import secrets
import struct
from pathlib import Path
from typing import Self

from relax_hpc.errors import LaunchError
from relax_hpc.runtime.files.storage import patiently

_BYTES = 32


class RunSecret:
    """The secret of a run, which its repr hides."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def new(cls) -> Self:
        """Makes one without a file, for a measurement or a test."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def create(cls, path: Path) -> Self:
        """Creates the file of a new run.

        Raises:
            FileExistsError: it exists.
        """
        secret = cls.new()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(file, 0o600)  # a umask can take the owner's bits, too
            os.write(file, secret._key.hex().encode())
            os.fsync(file)
        finally:
            os.close(file)
        return secret

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises:
        LaunchError: it is missing, not ours, or readable by others.
        """

        def load() -> tuple[os.stat_result, bytes]:
            with path.open("rb") as file:
                return os.fstat(file.fileno()), file.read()

        try:
            found, content = patiently(path, load)
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}; only the run's owner has it, and resume makes it anew"
            ) from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise LaunchError(
                f"{path}: owner {found.st_uid}, mode {found.st_mode & 0o777:04o}, but a secret is "
                f"its owner's alone; cancel the run, remove the file, and resume"
            )
        try:
            key = bytes.fromhex(content.decode())
        except ValueError:
            key = b""
        if len(key) != _BYTES:
            raise LaunchError(f"{path}: is not a secret; cancel the run, remove it, and resume")
        return cls(key)

    def derive(self, purpose: str) -> bytes:
        """Returns 32 bytes that only a holder of the secret can compute."""
        return derive(self._key, purpose)

    def engine_token(self, member: str, start: str) -> str:
        return self.derive(f"engine/{member}/{start}").hex()


def sign(key: bytes, count: int, content: bytes) -> bytes:
    """Returns the MAC of the message with that number, so that one repeated or moved fails."""
    return hmac.digest(key, struct.pack(">Q", count) + content, "sha256")


def derive(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()
