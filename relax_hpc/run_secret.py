"""The secret of a run: a file that only its owner reads, from which every key and token is derived.

So no token lies in a record, and what is derived for one purpose tells nothing about another.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Self

from relax_hpc.errors import LaunchError
from relax_hpc.storage import patiently

_BYTES = 32


class RunSecret:
    """Prints as nothing but its type."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def new(cls) -> Self:
        """One that lies nowhere: of a measurement, or a test."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def create(cls, path: Path) -> Self:
        """Makes the file of a new run.

        Raises:
            FileExistsError: there is one.
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
        """Reads the secret of a run.

        Raises:
            LaunchError: there is none, it is not ours, or others may read it.
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
        """32 bytes that only who knows the secret can tell."""
        return derive(self._key, purpose)

    def engine_token(self, member: str, start: str) -> str:
        """Bearer token of one start of an engine."""
        return self.derive(f"engine/{member}/{start}").hex()


def derive(key: bytes, purpose: str) -> bytes:
    """HMAC-SHA256 of `purpose`."""
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()
