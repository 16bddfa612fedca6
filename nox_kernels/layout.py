"""Layout: the one place that knows how packed rows become tiles and come back."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import RequestError
from .sequence import Sequence, TokenGrid

QUERY_TILE = 128
KV_TILE = 64

RASTER = "raster"
# Tile shapes that a head may choose from; files store indices into their own copy of this list.
MENU = (
    RASTER,
    "4x8x4",
    "4x4x8",
    "8x4x4",
    "2x8x8",
    "8x8x2",
    "8x2x8",
    "1x8x16",
    "1x16x8",
    "2x4x16",
    "2x16x4",
    "16x4x2",
    "16x2x4",
)


class TileShape(NamedTuple):
    """The (t, h, w) box of tokens that makes one query tile."""

    t: int
    h: int
    w: int

    @classmethod
    def parse(cls, name: str) -> "TileShape":
        """Read a name like "4x8x4".

        Raises:
            RequestError: The name is not three positive numbers joined by "x".
        """
        parts = name.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise RequestError(f"Tile shape {name!r} is not of the form 4x8x4 (t x h x w).")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


def swap_axes(name: str) -> str:
    """The same layout for the other orientation: h and w change places."""
    if name == RASTER:
        return name
    shape = TileShape.parse(name)
    return str(TileShape(shape.t, shape.w, shape.h))


@dataclass(frozen=True, eq=False)
class TileLayout:
    """How the packed rows of one head sit in tiles.

    Slots 0..num_video-1 hold the video, the rest of its last query tile is empty, and the tail
    (every other row, in packed order) starts at the next query tile. So a query tile never mixes
    video with other rows, and query tile i owns the KV tiles of its own slots.

    Attributes:
        name: "raster", a tile shape such as "4x8x4", or "packed".
        slot_row: [num_slots] int32, the packed row in each slot, -1 where a slot is empty.
        row_slot: [S] int32, the slot of each packed row.
        valid_count: [Nk] int32, real rows of each KV tile; they come first.
        query_tile: Slots of a query tile.
        kv_tile: Slots of a KV tile.
        num_video: Rows of the video.
        num_video_query_tiles: Query tiles of the video.
        num_video_kv_tiles: KV tiles of the video that hold a row; a trailing empty one is not
            counted.
        audio_query_tiles: Query tiles that hold a row of target audio, ascending.
    """

    name: str
    slot_row: Tensor
    row_slot: Tensor
    valid_count: Tensor
    query_tile: int
    kv_tile: int
    num_video: int
    num_video_query_tiles: int
    num_video_kv_tiles: int
    audio_query_tiles: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """S, packed rows."""
        return self.row_slot.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots, empty ones included; a multiple of the query tile."""
        return self.slot_row.shape[0]

    @property
    def num_query_tiles(self) -> int:
        """Nq."""
        return self.num_slots // self.query_tile

    @property
    def num_kv_tiles(self) -> int:
        """Nk, empty tiles included."""
        return self.num_slots // self.kv_tile

    @property
    def kv_per_query_tile(self) -> int:
        """KV tiles in the slots of one query tile."""
        return self.query_tile // self.kv_tile

    @property
    def first_tail_kv_tile(self) -> int:
        """First KV tile that holds no video."""
        return self.num_video_query_tiles * self.kv_per_query_tile

    @property
    def num_real_kv_tiles(self) -> int:
        """KV tiles that hold a row."""
        num_tail = self.num_rows - self.num_video
        return self.num_video_kv_tiles + math.ceil(num_tail / self.kv_tile)

    def to(self, device: torch.device | str) -> "TileLayout":
        """The same layout with its tensors on a device."""
        if self.slot_row.device == torch.device(device):
            return self
        return replace(
            self,
            slot_row=self.slot_row.to(device),
            row_slot=self.row_slot.to(device),
            valid_count=self.valid_count.to(device),
        )


def window_order(grid: TokenGrid, shape: TileShape) -> Tensor:
    """Order of the video tokens that makes each complete window one query tile.

    Complete windows come first, window by window (t, h, w blocks ascending) and row-major inside;
    then the tokens of windows that stick out of the grid, in the same order and without gaps.
    Every layout thus fills the same number of tiles, and only the last ones mix windows.

    Returns:
        [num_tokens] int64: the token held by each slot.
    """
    t, h, w = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")

    def complete(x: Tensor, window: int, extent: int) -> Tensor:
        return (x // window + 1) * window <= extent

    partial = ~(
        complete(t, shape.t, grid.t) & complete(h, shape.h, grid.h) & complete(w, shape.w, grid.w)
    )
    key = partial.long()
    for part, extent in (
        (t // shape.t, grid.t),
        (h // shape.h, grid.h),
        (w // shape.w, grid.w),
        (t % shape.t, shape.t),
        (h % shape.h, shape.h),
        (w % shape.w, shape.w),
    ):
        key = key * extent + part
    return key.flatten().argsort(stable=True)


def _tile_layout(
    name: str,
    sequence: Sequence,
    video_rows: Tensor,
    tail_rows: Tensor,
    query_tile: int,
    kv_tile: int,
) -> TileLayout:
    num_video_query_tiles = math.ceil(len(video_rows) / query_tile)
    num_tail_query_tiles = math.ceil(len(tail_rows) / query_tile)
    first_tail_slot = num_video_query_tiles * query_tile
    slot_row = torch.full(((num_video_query_tiles + num_tail_query_tiles) * query_tile,), -1)
    slot_row[: len(video_rows)] = video_rows
    slot_row[first_tail_slot : first_tail_slot + len(tail_rows)] = tail_rows
    row_slot = torch.empty(sequence.num_rows, dtype=torch.int64)
    filled = (slot_row >= 0).nonzero().flatten()
    row_slot[slot_row[filled]] = filled
    audio_slots = row_slot[sequence.is_audio]
    return TileLayout(
        name=name,
        slot_row=slot_row.int(),
        row_slot=row_slot.int(),
        valid_count=(slot_row >= 0).view(-1, kv_tile).sum(1, dtype=torch.int32),
        query_tile=query_tile,
        kv_tile=kv_tile,
        num_video=len(video_rows),
        num_video_query_tiles=num_video_query_tiles,
        num_video_kv_tiles=math.ceil(len(video_rows) / kv_tile),
        audio_query_tiles=tuple((audio_slots // query_tile).unique().tolist()),
    )


def raster_layout(
    sequence: Sequence, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Video tokens in their packed order, then the tail."""
    order = torch.arange(sequence.num_video)
    return _tile_layout(
        RASTER, sequence, sequence.video_start + order, sequence.tail_rows(), query_tile, kv_tile
    )


def window_layout(
    sequence: Sequence, shape: TileShape, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Video tokens grouped into 3D windows of `shape` (`window_order`), then the tail.

    Raises:
        RequestError: The shape does not hold `query_tile` tokens.
    """
    if shape.t * shape.h * shape.w != query_tile:
        raise RequestError(f"Tile shape {shape} does not hold {query_tile} tokens.")
    order = window_order(sequence.token_grid, shape)
    return _tile_layout(
        str(shape),
        sequence,
        sequence.video_start + order,
        sequence.tail_rows(),
        query_tile,
        kv_tile,
    )


def packed_layout(
    sequence: Sequence, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Every row in packed order with no split: what SageAttention itself tiles.

    Only for attention that keeps every tile; all rows count as video here.
    """
    rows = torch.arange(sequence.num_rows)
    return _tile_layout("packed", sequence, rows, rows[:0], query_tile, kv_tile)


def make_layout(
    sequence: Sequence, name: str, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """The layout called "raster" or by a tile shape such as "4x8x4".

    Raises:
        RequestError: The name is neither, or the shape does not hold `query_tile` tokens.
    """
    if name == RASTER:
        return raster_layout(sequence, query_tile, kv_tile)
    return window_layout(sequence, TileShape.parse(name), query_tile, kv_tile)
