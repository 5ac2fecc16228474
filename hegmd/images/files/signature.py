"""Identifies an image: its manifest's bytes, their checksum, and a signature by a key that nodes can share.

A CRIU image makes root's CRIU open and write whatever the image says. So an image that any user could have written is
only restored for root. Other users need a signature (HMAC-SHA-256) with this node's key, or with the one that several
nodes share. The manifest has the checksums of CRIU's files, so the signature covers these.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from pathlib import Path

from hegmd.errors import BAD_CONFIG, INCOMPATIBLE, UNAVAILABLE, HegmError, Refused
from hegmd.protocol.images import FORMAT, VERSION, Manifest
from hegmd.protocol.record import BadValue, as_map

KEY_NAME = "image.key"
MAX_BYTES = 8 << 20  # of a manifest; it is sent in one message
_KEY_BYTES = 32
_LINES = re.compile(rb"sha256 [0-9a-f]{64}\nhmac-sha256 [0-9a-f]{64}\n")
_PURPOSE = b"hegm-image-manifest\0"


class Key:
    """The secret of a node, or of several that restore one another's images."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(self, manifest: bytes) -> bytes:
        """Return the content of the file `seal` for those bytes."""
        lines = f"sha256 {hashlib.sha256(manifest).hexdigest()}\nhmac-sha256 {self._signature(manifest)}\n".encode()
        return lines + _own_sum(lines)

    def has_signed(self, manifest: bytes, seal: bytes) -> bool:
        """Return True if the seal is from this key and for those bytes."""
        found = _lines(seal).get("hmac-sha256", "").encode()
        return hmac.compare_digest(found, self._signature(manifest).encode())

    def _signature(self, manifest: bytes) -> str:
        return hmac.new(self._secret, _PURPOSE + manifest, hashlib.sha256).hexdigest()


def load_key(path: Path, *, make: bool) -> Key:
    """Return the key in that file; `make` creates it. Raises HegmError if it is not private, incomplete or missing."""
    try:
        if make:
            _make(path)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            text = file.read(4096)
    except OSError as error:
        raise HegmError(
            BAD_CONFIG,
            f"the image key {path} cannot be read: {error.strerror or error}",
            f"create one and copy it to the other nodes: openssl rand -hex {_KEY_BYTES} > {path}; chmod 0600 {path}",
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()) or mode & 0o077:
        raise HegmError(
            BAD_CONFIG,
            f"the image key {path} is not private (uid {status.st_uid}, mode {mode:04o})",
            f"create a new key of uid {os.geteuid()} with mode 0600: with this one a user can make root open any file",
        )
    with contextlib.suppress(ValueError):
        secret = bytes.fromhex(text.decode("ascii", "replace").strip())
        if len(secret) >= _KEY_BYTES:
            return Key(secret)
    raise HegmError(
        BAD_CONFIG,
        f"the image key {path} is not {2 * _KEY_BYTES} hexadecimal digits or more",
        f"create one: openssl rand -hex {_KEY_BYTES} > {path}",
    )


def _make(path: Path) -> None:
    """Create a key of random bytes atomically, unless there is one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    if path.exists():
        return
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)  # unlike a rename, it takes no other's place
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def written(manifest: Manifest) -> bytes:
    """Return the manifest's bytes on disk. Raises Refused if it would be too large to be read again."""
    data = json.dumps(manifest.to_plain(), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise Refused(
            f"the manifest would have {len(data)} bytes; the limit is {MAX_BYTES}",
            f"report this: {len(manifest.processes)} processes, {len(manifest.byte_files)} byte files",
        )
    return data


def read_manifest(path: str, data: bytes, seal: bytes) -> Manifest:
    """Return the manifest of that directory. Raises HegmError: damaged, no image at all, or of a later version."""
    if not _is_sound(seal):
        raise HegmError(
            UNAVAILABLE,
            f"{path} is damaged: {path}/seal does not match its own checksum",
            "copy the image again from a complete copy; never edit a seal",
            {"path": path},
        )
    if _lines(seal).get("sha256") != hashlib.sha256(data).hexdigest():
        raise HegmError(
            UNAVAILABLE,
            f"{path} is damaged: its manifest does not match its checksum in {path}/seal",
            "copy the image again from a complete copy; never edit a manifest",
            {"path": path},
        )
    try:
        plain = as_map(json.loads(data))
        if plain is None or plain.get("format") != FORMAT:
            raise Refused(f"{path} is not an image of hegmd: its manifest has another format", "name another directory")
        version = plain.get("version")
        if type(version) is not int or version > VERSION:
            raise HegmError(
                INCOMPATIBLE,
                f"{path} has version {version!r:.20}; this hegmd reads versions up to {VERSION}",
                f"restore it with hegmd {plain.get('hegmd_version')!s:.40} or a later one",
                {"path": path, "version": version if type(version) is int else None},
            )
        return Manifest.from_plain(plain, "manifest")
    except (ValueError, RecursionError, BadValue) as error:
        raise HegmError(
            UNAVAILABLE,
            f"{path} is damaged: its manifest is not valid: {error!s:.200}",
            "use another image, or copy this one again from a complete copy",
            {"path": path},
        ) from error


def _own_sum(lines: bytes) -> bytes:
    """Return the last line of a seal. It detects a damaged signature even if the key is unknown."""
    return f"seal-sha256 {hashlib.sha256(lines).hexdigest()}\n".encode()


def _is_sound(seal: bytes) -> bool:
    """Return True for an undamaged seal. Those of earlier builds have no checksum of their own."""
    lines = _LINES.match(seal)
    return lines is not None and seal[lines.end() :] in (b"", _own_sum(lines[0]))


def _lines(seal: bytes) -> dict[str, str]:
    parts = (line.partition(" ") for line in seal.decode("ascii", "replace").splitlines())
    return {name: value.strip() for name, _, value in parts}
