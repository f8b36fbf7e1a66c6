"""Sealed shards of a spool -> a store in an object store, in the background; each exactly once, also after kill -9.

A shard gets a number that no writer of any machine uses: that of the claim `.claims/NUMBER`, an object which only one
of them can create. It holds the shard's identity, so that a second attempt finds its own claim. The steps are

    note the number | claim it | upload the sidecar, then the shard | remove the claim, the local files, the note

and a shard that was interrupted between any two of them starts again with the number of its note.
"""

import threading
from contextlib import suppress
from pathlib import Path

from millstream.core.console import quoted, say
from millstream.core.files import locked, publish
from millstream.core.remote import RemotePath
from millstream.errors import CorruptShard
from millstream.traces.store.format import Seal
from millstream.traces.store.manifest import (
    list_shards,
    read_manifest,
    read_shard_seal,
    read_sidecar,
    shard_name,
    sidecar_name,
    write_manifest,
)

CLAIMS = ".claims"  # a folder of the store; empty while no shard is being uploaded
MOST_WAITING = 2  # sealed shards in the spool, before a writer waits
_LOCK = ".uploads.lock"
_LOOK_S = 0.5  # another process may have uploaded what this one waits for


class Uploads:
    """Uploads what is sealed in a spool. One process at a time does so for all writers of the spool."""

    def __init__(self, target: RemotePath, spool: Path) -> None:
        self.kept_back: frozenset[int] = frozenset()  # shards that stay in the spool
        self._target = target
        self._spool = spool
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_tested = False  # whether the server keeps conditions

    def waiting(self) -> list[int]:
        """The sealed shards in the spool that are to be uploaded."""
        return [number for number in list_shards(self._spool)[0] if number not in self.kept_back]

    def start(self) -> None:
        """Upload in the background what is sealed, and what will be sealed meanwhile."""
        with self._changed:
            if self._thread is None and self.waiting():
                self._thread = threading.Thread(target=self._run, daemon=True, name="millstream-uploads")
                self._thread.start()

    def check(self) -> None:
        """Raise what stopped the uploads, once; the next `start` tries again."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` sealed shards are left, and with 0 until the manifest lists them."""
        self.check()
        self.start()
        with self._changed:
            while self._thread is not None and (most == 0 or len(self.waiting()) > most):
                self._changed.wait(_LOOK_S)
        self.check()

    def settle(self) -> None:
        """Complete the uploads that a killed process did not acknowledge, and give up the numbers of all others."""
        with locked(self._spool / _LOCK):
            for number in list_shards(self._spool)[0]:
                file = self._spool / shard_name(number)
                note, seal = self._note(file), read_shard_seal(file)
                claimed = _number_in(note)
                if claimed is None or seal is None:
                    continue
                if self._is_at(claimed, file, seal):
                    self._claim_file(claimed).unlink()
                    self._remove(number)
                elif self._is_claimed_by(claimed, _identity(file, seal)):
                    self._claim_file(claimed).unlink()
                    note.unlink()

    def _run(self) -> None:
        error: BaseException | None = None
        while error is None:
            try:
                with locked(self._spool / _LOCK):
                    for number in self.waiting():
                        self._upload(number)
                        with self._changed:
                            self._changed.notify_all()
                    write_manifest(self._target, read_manifest(self._target))
            except BaseException as caught:  # also a panic of a client
                error = caught
            with self._changed:
                if error is not None or not self.waiting():
                    self._error, self._thread = error, None
                    self._changed.notify_all()
                    return

    def _upload(self, number: int) -> None:
        file = self._spool / shard_name(number)
        seal = read_shard_seal(file)
        sidecar = seal and read_sidecar(self._spool, number, seal.sidecar_crc32c)
        if seal is None or sidecar is None:
            raise CorruptShard(f"{file}: damaged before it was uploaded. Run: millstream repair {quoted(self._spool)}")
        free, is_uploaded = self._claim(file, seal)
        if not is_uploaded:
            (self._target / sidecar_name(free)).put(sidecar)  # before the shard: readers list shards
            (self._target / shard_name(free)).put(file)
        self._claim_file(free).unlink()
        self._remove(number)

    def _remove(self, number: int) -> None:
        file = self._spool / shard_name(number)
        for done in (file, self._spool / sidecar_name(number), self._note(file)):
            done.unlink(missing_ok=True)

    def _claim(self, file: Path, seal: Seal) -> tuple[int, bool]:
        """The number for a shard, claimed; and whether it has been uploaded under this number before."""
        identity, note = _identity(file, seal), self._note(file)
        number = _number_in(note)
        if number is None:
            number = self._first_free()
        while True:
            publish(note, str(number).encode())
            if self._make_claim(number, identity):
                if self._is_at(number, file, seal):
                    return number, True
                if not (self._target / shard_name(number)).is_file():
                    return number, False
                self._claim_file(number).unlink()  # uploaded by another writer, which has removed its claim
            number += 1

    def _is_at(self, number: int, file: Path, seal: Seal) -> bool:
        """Whether a shard has been uploaded under this number."""
        place = self._target / shard_name(number)
        return place.is_file() and place.info().num_bytes == file.stat().st_size and read_shard_seal(place) == seal

    def _is_claimed_by(self, number: int, identity: bytes) -> bool:
        claim = self._claim_file(number)
        return claim.is_file() and claim.read_bytes() == identity

    def _make_claim(self, number: int, identity: bytes) -> bool:
        """Claim a number; False if another writer has claimed it."""
        claim = self._claim_file(number)
        try:
            claim.put(identity, is_new=True)
        except FileExistsError:
            return False
        if not self._is_tested:
            self._is_tested = True
            with suppress(FileExistsError):
                claim.put(b"another " + identity, is_new=True)
                say(f"{self._target}: the server ignores conditions, so only one machine at a time may write here")
                claim.put(identity)
        return True

    def _first_free(self) -> int:
        claimed = [int(name) for name in (self._target / CLAIMS).entries() if name.isdigit()]
        return max([-1, *list_shards(self._target)[0], *claimed]) + 1

    def _claim_file(self, number: int) -> RemotePath:
        return self._target / CLAIMS / f"{number:05d}"

    def _note(self, file: Path) -> Path:
        return file.with_name(f".{file.name}.number")


def _identity(file: Path, seal: Seal) -> bytes:
    return f"{seal.header_crc32c:08x} {seal.sidecar_crc32c:08x} {seal.records} {file.stat().st_size}".encode()


def _number_in(note: Path) -> int | None:
    try:
        return int(note.read_text())
    except (FileNotFoundError, ValueError):
        return None
