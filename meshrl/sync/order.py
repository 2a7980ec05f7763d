"""The order in which the buckets of a sync come: those of one stream one after the other, to the last."""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.core.errors import SyncError
from meshrl.sync.manifest import Layout, Piece, Stream


class Order:
    """Which bucket of each stream comes next. name: of the receiver, in errors."""

    def __init__(self, layout: Layout, name: str):
        self._streams, self._name = layout.streams, name
        self._next = [0] * len(layout.streams)

    def stream_of(self, stream: int, index: int) -> Stream:
        """The stream of a bucket that has come. Raises: SyncError unless it is the stream's next."""
        streams = self._streams
        if not 0 <= stream < len(streams):
            raise SyncError(f"{self._name}: bucket {index} came of stream {stream} of {len(streams)}")
        own, upcoming = streams[stream], self._next[stream]
        if index != upcoming or index >= own.num_buckets:
            left = upcoming < own.num_buckets
            wanted = f"bucket {upcoming} ({carries(list(own.pieces(upcoming)))})" if left else "no more"
            what = "came twice" if 0 <= index < upcoming else "came out of order"
            raise SyncError(f"{self._name}: bucket {index} {what}; expected {wanted} of {own.num_buckets}")
        return own

    def taken(self, stream: int) -> None:
        """The stream's next bucket is in place."""
        self._next[stream] += 1

    def check_complete(self) -> None:
        """Raises: SyncError naming the first tensor that is incomplete."""
        for stream, arrived in zip(self._streams, self._next, strict=True):
            if arrived < stream.num_buckets:
                first = next(stream.pieces(arrived)).entry.name
                raise SyncError(
                    f"{self._name}: commit after {arrived} of {stream.num_buckets} buckets; {first} is the first "
                    "tensor that is incomplete"
                )


def carries(pieces: Sequence[Piece]) -> str:
    """The tensors of a bucket, in words."""
    names = [piece.entry.name for piece in pieces]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
