"""A part of an answer, ready to be sent: stored bytes by sendfile, small pieces of files together, what was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import TypeAlias

from natslog.errors import CorruptLog, NatslogError
from natslog.http.answers import Answer
from natslog.http.sending import Body, UnreadableFile
from natslog.log import FilePiece, FileRange
from natslog.log.segment import read_at
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread

QUICK_BYTES = 256 * 1024
"""What is made of so much takes no slot."""
_SMALL_PIECE_BYTES = 64 * 1024
"""A piece of a file that is not larger is read, and sent together with others, rather than by sendfile."""

Sendable: TypeAlias = Answer | FileRange | FilePiece | bytes
"""What a part consists of."""


class _UnreadablePiece(UnreadableFile):
    def __init__(self, piece: FilePiece, why: object) -> None:
        super().__init__(f"{piece.length} bytes at byte {piece.position} cannot be read: {why}")
        self.piece = piece


class Part:
    """A part that is ready to be sent. A context manager, which releases the resources of the part.

    Attributes:
        next_offset: where the part after this one begins.
        is_whole: it consists of stored batches, or of columns of them, none of them cut.
        is_framed: it holds what opens and ends the answer, too.
        removed_rows: how many of its offsets have no message any more.
    """

    def __init__(
        self,
        stream: HostedStream,
        readers: Executor,
        next_offset: int,
        pieces: Sequence[Sendable],
        held: ExitStack,
        *,
        is_whole: bool,
        is_framed: bool = False,
        removed_rows: int = 0,
    ) -> None:
        self.next_offset = next_offset
        self.is_whole = is_whole
        self.is_framed = is_framed
        self.removed_rows = removed_rows
        self.length = sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in pieces)
        self._stream, self._readers, self._pieces, self._held = stream, readers, pieces, held

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    async def send(self, body: Body) -> None:
        """Raises ConnectionResetError: the client has disconnected or reads too slowly, or a file cannot be read to its
        end. No error response can be sent then.
        """
        self._stream.sent_bytes += self.length
        for group in _grouped(self._pieces):
            piece = group[0]
            try:
                if isinstance(piece, Answer):
                    await piece.send(body)
                elif _is_small(piece):
                    is_read = any(isinstance(one, FilePiece) for one in group)
                    join = partial(in_thread, self._readers, _read_together)
                    await body.send_bytes(await join(group) if is_read else _read_together(group))
                else:
                    assert not isinstance(piece, bytes), "these are sent with others"
                    await body.send_file(piece.fd, piece.position, piece.length)
            except UnreadableFile as error:
                if isinstance(error, _UnreadablePiece):
                    piece = error.piece
                assert isinstance(piece, FileRange | FilePiece), "nothing else is read from a file"
                body.abort()
                self._note_damage(piece, error)
                raise ConnectionResetError("the answer cannot be ended") from error
            except NatslogError as error:  # its headers were sent: no error response can follow
                body.abort()
                raise ConnectionResetError(f"the answer cannot be ended: {error.message}") from error

    def _note_damage(self, piece: FileRange | FilePiece, error: UnreadableFile) -> None:
        self._stream.usable_log().reader.forget_proofs(piece.path)  # so that the next request gets the error
        damaged = CorruptLog(f"{piece.path}: {error}", file=str(piece.path), position=piece.position)
        self._stream.note_damage(damaged)


def _is_small(piece: Sendable) -> bool:
    return isinstance(piece, bytes) or (isinstance(piece, FilePiece) and piece.length <= _SMALL_PIECE_BYTES)


def _grouped(pieces: Sequence[Sendable]) -> Iterator[list[Sendable]]:
    """Small neighbours together, as headers and columns of small batches; each other piece by itself."""
    small: list[Sendable] = []
    small_bytes = 0
    for piece in pieces:
        is_small = _is_small(piece)
        if small and (not is_small or small_bytes > QUICK_BYTES):
            yield small
            small, small_bytes = [], 0
        if not is_small:
            yield [piece]
        else:
            assert not isinstance(piece, Answer), "these are not small"
            small.append(piece)
            small_bytes += len(piece) if isinstance(piece, bytes) else piece.length
    if small:
        yield small


def _read_together(group: Sequence[Sendable]) -> bytes:
    """Raises UnreadableFile: a file cannot be read, or is too short."""
    return b"".join(piece if isinstance(piece, bytes) else _read(piece) for piece in group)


def _read(piece: Sendable) -> bytes:
    assert isinstance(piece, FilePiece), "only these are read"
    try:
        data = read_at(piece.fd, piece.position, piece.length)
    except OSError as error:
        raise _UnreadablePiece(piece, error) from error
    if len(data) < piece.length:
        raise _UnreadablePiece(piece, "the file ends before")
    return data
