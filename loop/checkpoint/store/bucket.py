"""Bucket: objects below a URL. What is put is confirmed by its hash, and what is got is checked by it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from callbacks.files import fsync_directory, reading, replacing
from callbacks.run_record.redaction import mask, tell
from loop.errors import TrainingError, UsageError

# An ETag depends on the size of the parts: what is sent and what is hashed must be cut in the same way.
PART = 8 << 20
"""Bytes of a part of a large object."""
_SAID = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>")
"""In an answer: why the store refuses, such as that there is no such bucket, or that this machine's clock is wrong."""
_REFUSED = re.compile(r"status code: 4(?!08|09|25|29)\d\d")
"""In an error of the library: the store refuses, with an HTTP status for which asking again doesn't help.

It may help after 408 (timeout), 409 (conflict), 425 (too early) and 429 (too many requests).
"""
_NO_CREDENTIALS = re.compile(r"/latest/api/token|/computeMetadata/|/metadata/identity/|Account must be|Missing Secret")
"""In an error of the library: it has found no credentials, and asked the cloud's machine in vain, or it lacks one."""
_CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables with the credentials, by the scheme of the URL; all others are Amazon's."""
_BAD_KEY = re.compile(r'invalid path: .*?"([^"]*)"')
"""In an error of the library: the store has an object whose name is no path, such as with `..`, and lists nothing."""
_PAUSE = 3.0
"""Seconds between two tries, while the store doesn't answer."""
_TRIES = 5
"""How often an object is asked for whose bytes aren't those that were put."""


class StoreError(TrainingError):
    """The store did not answer, refused, or answered wrongly; the message is one line."""


class RefusedError(StoreError):
    """The store refuses, as with wrong credentials: asking again doesn't help."""


class MissingError(StoreError):
    """There is no such object."""


class DamagedError(StoreError):
    """An object isn't what was put, however often it is asked for."""


class Patience:
    """Waits for a store that doesn't answer, and says so once.

    Args:
        seconds: for how long, from the first failure.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: float | None = None

    def wait(self, error: StoreError) -> None:
        """Waits a while after a failure.

        Raises:
            StoreError: the given one; the store refuses, or has not answered for so long.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._seconds
        if isinstance(error, RefusedError) or time.monotonic() >= self._deadline:
            raise error
        if is_first:
            tell(f"warning: {error}: trying again for {self._seconds:g} s")
        time.sleep(_PAUSE)


class Digest(NamedTuple):
    """What identifies the content of a file."""

    bytes: int  # how many
    sha256: str  # the hash of all
    etag: str  # what a store of S3's kind has as its ETag, of one part or of several


def digest_of(chunks: Iterator[bytes]) -> Digest:
    """The digest of a content, in chunks of `PART` bytes."""
    # The ETag of one part is the hash of its content; that of several, the hash of their hashes, and their number.
    size = 0
    sha256 = hashlib.sha256()
    part = hashlib.md5(usedforsecurity=False)
    parts = []
    for chunk in chunks:
        size += len(chunk)
        sha256.update(chunk)
        part = hashlib.md5(chunk, usedforsecurity=False)
        parts.append(part.digest())
    etag = part.hexdigest()
    if len(parts) > 1:
        etag = f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
    return Digest(size, sha256.hexdigest(), etag)


def digest_of_file(path: Path) -> Digest:
    """The digest of a file."""
    with reading(path, shared=True) as file:
        return digest_of(iter(lambda: file.read(PART), b""))


class Bucket:
    """The objects below a URL.

    Args:
        url: of the run.
        store: the store itself, as `obstore` has it; None: that of the URL.
        make: whether a missing directory is made. A process that only reads must not make one.

    Raises:
        UsageError: there is no such directory.
    """

    def __init__(self, url: str, store: object = None, make: bool = False) -> None:
        self.url = url
        self._obstore = _obstore()
        with self._errors("open"):
            self._store = _open(url, make) if store is None else store

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turns the library's errors into a `StoreError` of one line."""
        try:
            yield
        except (UsageError, StoreError):
            raise
        except FileNotFoundError:
            raise MissingError(f"{self.url}: {key} isn't there") from None
        except Exception as error:
            is_of_library = type(error).__module__.split(".")[0] == "obstore"
            if not is_of_library and not isinstance(error, OSError | ValueError):
                raise
            kind = RefusedError if _REFUSED.search(str(error)) else StoreError
            raise kind(f"{self.url}: {_explained(self.url, str(error), kind is RefusedError)}") from None

    def create(self, key: str, content: bytes) -> bool:
        """Makes an object, unless there is one of that name; returns whether it was made, by this call."""
        # The store may have made it, and its answer was lost: the content says whose it is.
        return self._created(key, content) or self.get(key) == content

    def creates_once(self, key: str, content: bytes) -> bool:
        """Whether the store refuses to create an object that is there.

        Args:
            key: of that object.
            content: what it has: nothing changes in a store that creates it again.
        """
        return not self._created(key, content)

    def _created(self, key: str, content: bytes) -> bool:
        """Whether the store says that it has created an object, and not that there is one of that name."""
        with self._errors(key):
            try:
                self._obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
                return False
        return True

    def put(self, key: str, content: bytes) -> Digest:
        """Puts an object, and confirms it."""
        digest = digest_of(content[start : start + PART] for start in range(0, len(content), PART))
        with self._errors(key):
            self._obstore.put(self._store, key, content, use_multipart=len(content) > PART, chunk_size=PART)
        self._confirm(key, digest)
        return digest

    def upload(self, key: str, file: BufferedReader) -> Digest:
        """Puts the content of an open file that doesn't change, large ones in parts, and confirms it."""
        digest = digest_of(iter(lambda: file.read(PART), b""))
        file.seek(0)
        with self._errors(key):
            large = digest.bytes > PART
            content = file if large else file.read()  # a large one is read as it is sent, a part after the other
            self._obstore.put(self._store, key, content, use_multipart=large, chunk_size=PART)
        self._confirm(key, digest)
        return digest

    def _confirm(self, key: str, digest: Digest) -> None:
        """Checks that the store has what was put: by an ETag that is a hash of it, else by reading it.

        Raises:
            StoreError: it hasn't.
        """
        with self._errors(key):
            about = self._obstore.head(self._store, key)
        if about["size"] == digest.bytes and str(about["e_tag"]).strip('"') == digest.etag:
            return
        if about["size"] == digest.bytes and self._read(key).sha256 == digest.sha256:
            return
        raise StoreError(f"{self.url}: the store has other bytes of {key} than were sent")

    def _read(self, key: str) -> Digest:
        with self._errors(key):
            return digest_of(self._chunks(key))

    def _chunks(self, key: str) -> Iterator[bytes]:
        """The content of an object in chunks of `PART` bytes, the last one shorter."""
        rest = b""
        for chunk in self._obstore.get(self._store, key).stream(min_chunk_size=PART):
            rest += bytes(chunk)
            while len(rest) >= PART:
                yield rest[:PART]
                rest = rest[PART:]
        if rest:
            yield rest

    def get(self, key: str) -> bytes:
        """The content of a small object."""
        with self._errors(key):
            return bytes(self._obstore.get(self._store, key).bytes())

    def download(
        self, key: str, path: Path, size: int, sha256: str, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Writes an object to a file, durably, if each byte is as it was put.

        Args:
            key: of the object.
            path: of the file.
            size: bytes that it must have.
            sha256: the hash that it must have.
            meanwhile: is called after each `PART` bytes.

        Raises:
            StoreError: the store has other bytes, or gives others each time.
            UsageError: the file can't be written: no fault of the store, which needs not be asked again.
        """
        problem: StoreError = DamagedError(f"{self.url}: {key} has changed since it was written")
        for attempt in range(_TRIES):
            time.sleep(0.2 * attempt)
            try:
                with replacing(path, durable=True) as file:  # after an error, nothing of it is left
                    self._write(key, file, size, sha256, meanwhile)
                return
            except MissingError as error:  # asking again doesn't bring it
                raise MissingError(
                    f"{error}: on the machine that trained the run, tfloop sync {self.url} delivers it again; without "
                    "that machine, the run can't go on at this URL: give another one"
                ) from None
            except StoreError as error:
                problem = error
            except OSError as error:
                raise UsageError(
                    f"{path} can't be written ({error.strerror}): make room there, and start the same command again"
                ) from None
        raise problem

    def _write(self, key: str, file: IO[bytes], size: int, sha256: str, meanwhile: Callable[[], object]) -> None:
        """Writes an object to a file.

        Raises:
            DamagedError: it has other bytes.
        """
        digest = hashlib.sha256()
        count = 0
        with ThreadPoolExecutor(1, "hash") as pool:
            hashed = pool.submit(digest.update, b"")
            for chunk in self._stream(key):
                hashed.result()  # of the chunk before: it was hashed while this one came
                hashed = pool.submit(digest.update, chunk)
                file.write(chunk)
                count += len(chunk)
                meanwhile()
                if count > size:  # other bytes, of any length: the rest isn't waited for
                    break
        if (count, digest.hexdigest()) != (size, sha256):
            raise DamagedError(f"{self.url}: {key} has changed since it was written")

    def _stream(self, key: str) -> Iterator[memoryview]:
        """The content of an object. Errors of the code that uses the chunks aren't turned into a `StoreError`."""
        with self._errors(key):
            for chunk in self._obstore.get(self._store, key).stream(min_chunk_size=PART):
                yield memoryview(chunk)

    def keys(self, prefix: str) -> list[str]:
        """The names of all objects below a prefix, sorted."""
        with self._errors(prefix):
            keys: list[str] = []
            for page in self._obstore.list(self._store, prefix):
                keys += [entry["path"] for entry in page]
            return sorted(keys)

    def folders(self) -> list[str]:
        """The names of the folders right below the URL, sorted, without a look at what is in them."""
        with self._errors("a folder"):
            return sorted(self._obstore.list_with_delimiter(self._store)["common_prefixes"])

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that aren't there are passed over."""
        for key in keys:
            with contextlib.suppress(MissingError), self._errors(key):
                self._obstore.delete(self._store, key)


def _explained(url: str, text: str, refused: bool) -> str:
    """An error of the library in a line, with the fix if it is known."""
    if _NO_CREDENTIALS.search(text):
        variables = _CREDENTIALS.get(urlsplit(url).scheme, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return f"no credentials were found: set {variables}"
    if bad := _BAD_KEY.search(text):
        return f"an object there has a name that is no path ({bad[1]!r}): remove it from the store"
    line = f"{mask(_first_line(text)):.300}"
    return f"{line}: check the credentials, the bucket's name and its region" if refused else line


def _first_line(text: str) -> str:
    """The first line of an error of the library. If it quotes the store's XML, what that says comes first."""
    line = text.strip().partition("\n")[0]
    said = _SAID.search(text)
    return f"{said[1]}: {said[2]} ({line.partition(': <')[0]})" if said else line


def _obstore() -> ModuleType:
    """The library, which is an extra.

    Raises:
        UsageError: it isn't installed.
    """
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise UsageError("a run at a URL needs obstore: pip install 'tfloop[store]'") from None


def _open(url: str, make: bool) -> Any:
    """The store of a URL. Credentials are found by the library, as the cloud's own tools find them."""
    stores = importlib.import_module("obstore.store")
    parts = urlsplit(url)
    if parts.scheme == "file":
        directory = Path(unquote(parts.path))
        if directory.is_file():
            raise UsageError(f"{url}: it is a file: give a directory")
        is_new = not directory.exists()
        if is_new and not make:
            raise UsageError(f"{url}: there is no such directory")
        if is_new:
            _make_directory(url, directory)
        return stores.LocalStore(directory)
    # Few and short retries: callers try again by themselves, and tell the user.
    options: dict[str, Any] = {
        "client_options": {"timeout": "60s", "connect_timeout": "5s", "allow_http": True},
        "retry_config": {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=5)},
    }
    # A server of S3's kind, such as MinIO: the bucket is in the path, and not in the host's name as with Amazon.
    if parts.scheme in ("http", "https"):
        bucket, _, prefix = unquote(parts.path).strip("/").partition("/")
        endpoint = f"{parts.scheme}://{parts.netloc}"
        return stores.S3Store(bucket, prefix=prefix, endpoint=endpoint, virtual_hosted_style_request=False, **options)
    return stores.from_url(url, **options)


def _make_directory(url: str, directory: Path) -> None:
    """Makes the directory of a URL, and those above it.

    Raises:
        UsageError: it can't be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)  # another worker may make it, too
    except OSError as error:
        raise UsageError(f"{url}: the directory can't be made ({error.strerror}): give another one") from None
    fsync_directory(directory.parent)  # a power failure must not take the directory with what is in it
