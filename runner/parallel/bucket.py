"""Static buckets: which parameters travel together, and how they lie in a message.

A message is [world, width]: row r holds the r-th 1/world of every member, so that one collective
reduces and shards many tensors. The plan depends on the layout alone, never on the order in which
gradients happen to become ready: a resumed run adds in the same order as an uninterrupted one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runner.parallel.layout import Layout


class Member(NamedTuple):
    """Elements `offset` to `offset + numel` of a flat buffer, `span` of them in each row at `column`."""

    parameter: int  # its index in Layout.placed
    offset: int
    numel: int
    column: int
    span: int


class Bucket(NamedTuple):
    """Parameters that travel in one message of `world` rows of `width` elements."""

    members: tuple[Member, ...]
    width: int


def plan(layout: Layout, *, world: int, bucket_mb: float) -> list[Bucket]:
    """Return the buckets, the last parameters first, as backward makes their gradients (fp32 MiB each)."""
    limit = bucket_mb * 2**20 / 4 / world
    buckets: list[Bucket] = []
    members: list[Member] = []
    width = 0
    for index in reversed(range(len(layout.placed))):
        placed = layout.placed[index]
        span = -(-placed.numel // world)
        if members and width + span > limit:
            buckets.append(Bucket(tuple(members), width))
            members, width = [], 0
        members.append(Member(index, placed.offset, placed.numel, width, span))
        width += span
    return [*buckets, Bucket(tuple(members), width)]


def pack(bucket: Bucket, flat: Tensor, *, rows: Tensor) -> None:
    """Copy the members from `flat` into `rows` [world, width]; what pads a row is left as it is."""
    for member in bucket.members:
        for row, piece in _pieces(member, flat, rows=rows):
            row.copy_(piece)


def unpack(bucket: Bucket, rows: Tensor, *, flat: Tensor) -> None:
    """Copy the members from `rows` [world, width] into `flat`."""
    for member in bucket.members:
        for row, piece in _pieces(member, flat, rows=rows):
            piece.copy_(row)


def pack_shard(bucket: Bucket, flat: Tensor, *, rank: int, row: Tensor) -> None:
    """Copy the rank's shard of each member, none of them padded, from `flat` into `row` [width]."""
    for member in bucket.members:
        row[member.column : member.column + member.span] = _shard(member, flat, rank=rank)


def unpack_shard(bucket: Bucket, row: Tensor, *, rank: int, flat: Tensor) -> None:
    """Copy the rank's shard of each member, none of them padded, from `row` [width] into `flat`."""
    for member in bucket.members:
        _shard(member, flat, rank=rank).copy_(row[member.column : member.column + member.span])


def _shard(member: Member, flat: Tensor, *, rank: int) -> Tensor:
    first = member.offset + rank * member.span
    return flat[first : first + member.span]


def _pieces(member: Member, flat: Tensor, *, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of views of a message and of `flat` that hold the same elements."""
    whole = flat[member.offset : member.offset + member.numel]
    columns = rows[:, member.column : member.column + member.span]
    if member.numel == member.span * len(rows):
        return [(columns, whole.view(columns.shape))]
    pieces = torch.split(whole, member.span)
    return [(columns[r, : piece.numel()], piece) for r, piece in enumerate(pieces)]
