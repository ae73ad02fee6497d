"""The items of a source that have a bucket, by number: what kinds of training samples have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wandistiller.data.buckets import Bucket
from wandistiller.data.sources import Source


class SourceSamples:
    """Numbers samples from 0 over those items that are not left out."""

    def __init__(self, source: Source, buckets: Sequence[Bucket | None]) -> None:
        """``buckets`` has one entry an item of the source; those without a bucket are left out."""
        self.source = source
        self.items = [index for index, bucket in enumerate(buckets) if bucket is not None]
        self.buckets: Sequence[Bucket] = [bucket for bucket in buckets if bucket is not None]

    def leave_out(self, numbers: Collection[int]) -> None:
        """Go on without some samples; those after them get other numbers."""
        kept = [number for number in range(len(self)) if number not in numbers]
        self.items = [self.items[number] for number in kept]
        self.buckets = [self.buckets[number] for number in kept]

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """Return what a message calls a sample."""
        return self.source.name(self.items[index])

    def caption(self, index: int) -> str:
        """Return a sample's caption."""
        return self.source.caption(self.items[index])
