"""Layout: the one place that knows how packed rows become tiles and come back."""

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import RequestError
from .sequence import Sequence, TokenGrid

QUERY_TILE = 128
KV_TILE = 64
LARGE_REFERENCE = 1024  # rows of a visual reference from which it may be routed

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
        if len(parts) != 3 or not all(
            re.fullmatch("[0-9]{1,4}", part) and int(part) for part in parts
        ):
            raise RequestError(f"Tile shape {name[:40]!r} is not of the form 4x8x4 (t x h x w).")
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

    Routed rows come first: the video, in Veda's layouts behind the conditions that are tiled too.
    The tail (every other row, in packed order) starts at the next query tile. So a query tile
    never mixes routed with other rows, and query tile i owns the KV tiles of its own slots.

    Attributes:
        name: "raster", a tile shape such as "4x8x4", "packed", or "veda 4x8x4".
        slot_row: [num_slots] int32, the packed row in each slot, -1 where a slot is empty.
        row_slot: [S] int32, the slot of each packed row.
        valid_count: [Nk] int32, real rows of each KV tile; they come first.
        query_tile: Slots of a query tile.
        kv_tile: Slots of a KV tile.
        num_video_query_tiles: Query tiles before the tail.
        num_condition_tiles: Of those, the first ones, which hold tiled conditions.
        num_video_kv_tiles: KV tiles before the tail that hold a row; empty ones are not counted.
        num_real_kv_tiles: KV tiles that hold a row.
        audio_query_tiles: Query tiles that hold a row of target audio, ascending.
        reference_kv_tiles: Of each large visual reference in the tail (see `LARGE_REFERENCE`),
            the KV tiles that are full of it.
    """

    name: str
    slot_row: Tensor
    row_slot: Tensor
    valid_count: Tensor
    query_tile: int
    kv_tile: int
    num_video_query_tiles: int
    num_condition_tiles: int
    num_video_kv_tiles: int
    num_real_kv_tiles: int
    audio_query_tiles: tuple[int, ...]
    reference_kv_tiles: tuple[range, ...]

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
        """First KV tile of the tail."""
        return self.num_video_query_tiles * self.kv_per_query_tile

    @property
    def query_valid_count(self) -> Tensor:
        """[Nq] int64, real rows of each query tile."""
        return self.valid_count.view(-1, self.kv_per_query_tile).sum(1)

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


def tile_order(grid: TokenGrid, shape: TileShape) -> Tensor:
    """Veda's tiles of a token grid: every tile a box, padded at its end where the grid cuts it.

    Tiles go by h block, then w block, then t block, which runs fastest.

    Returns:
        [num_tiles, t * h * w] int64: the token held by each slot of each tile, -1 = padding. Real
        tokens come first, in (t, h, w) order, and every tile holds one.
    """
    blocks = [-(-extent // box) for extent, box in zip(grid, shape, strict=True)]
    padded = [count * box for count, box in zip(blocks, shape, strict=True)]
    token = torch.full(padded, -1)
    token[: grid.t, : grid.h, : grid.w] = torch.arange(grid.num_tokens).view(*grid)
    token = token.view(blocks[0], shape.t, blocks[1], shape.h, blocks[2], shape.w)
    tiles = token.permute(2, 4, 0, 1, 3, 5).flatten(3).flatten(0, 2)
    is_padding = (tiles < 0).to(torch.uint8)
    return tiles.gather(1, is_padding.argsort(dim=1, stable=True))


def power_of_two_shapes(num_tokens: int = QUERY_TILE) -> tuple[TileShape, ...]:
    """Every tile shape of `num_tokens` tokens whose edges are powers of two, ascending."""
    edges = [1 << power for power in range(num_tokens.bit_length())]
    return tuple(
        TileShape(t, h, num_tokens // (t * h))
        for t in edges
        for h in edges
        if num_tokens % (t * h) == 0
    )


def least_padding_shape(grid: TokenGrid, num_tokens: int = QUERY_TILE) -> TileShape:
    """The power-of-two shape that covers a grid with the fewest tiles.

    Of equals the one nearest to a cube (smallest ratio of its longest to its shortest edge), then
    the smallest as (t, h, w). Shapes that fit the grid go before those that do not.
    """

    def cost(shape: TileShape) -> tuple:
        num_tiles = math.prod(-(-n // box) for n, box in zip(grid, shape, strict=True))
        return num_tiles, max(shape) / min(shape), shape

    menu = power_of_two_shapes(num_tokens)
    fitting = [s for s in menu if all(box <= n for n, box in zip(grid, s, strict=True))]
    return min(fitting or menu, key=cost)


def _tile_layout(
    name: str,
    sequence: Sequence,
    routed: Tensor,
    query_tile: int,
    kv_tile: int,
    num_condition_tiles: int = 0,
) -> TileLayout:
    """A layout from what it routes; every other row is the tail.

    Args:
        name: Of the layout.
        sequence: The packed sequence.
        routed: [slots] int64 packed row of each slot, -1 = empty; filled up to a query tile.
        query_tile: Slots of a query tile.
        kv_tile: Slots of a KV tile.
        num_condition_tiles: See `TileLayout`.
    """
    is_tail = torch.ones(sequence.num_rows, dtype=torch.bool)
    is_tail[routed[routed >= 0]] = False
    tail_rows = is_tail.nonzero().flatten()
    num_video_query_tiles = math.ceil(len(routed) / query_tile)
    num_tail_query_tiles = math.ceil(len(tail_rows) / query_tile)
    first_tail_slot = num_video_query_tiles * query_tile
    slot_row = torch.full(((num_video_query_tiles + num_tail_query_tiles) * query_tile,), -1)
    slot_row[: len(routed)] = routed
    slot_row[first_tail_slot : first_tail_slot + len(tail_rows)] = tail_rows
    row_slot = torch.empty(sequence.num_rows, dtype=torch.int64)
    filled = (slot_row >= 0).nonzero().flatten()
    row_slot[slot_row[filled]] = filled
    valid_count = (slot_row >= 0).view(-1, kv_tile).sum(1, dtype=torch.int32)
    is_real = valid_count > 0
    audio_slots = row_slot[sequence.is_audio]
    references = [
        segment
        for segment in sequence.segments
        if segment.kind == "ref_img"
        and segment.num_rows >= LARGE_REFERENCE
        and is_tail[segment.start]
    ]
    first_slots = [int(row_slot[segment.start]) for segment in references]
    return TileLayout(
        name=name,
        slot_row=slot_row.int(),
        row_slot=row_slot.int(),
        valid_count=valid_count,
        query_tile=query_tile,
        kv_tile=kv_tile,
        num_video_query_tiles=num_video_query_tiles,
        num_condition_tiles=num_condition_tiles,
        num_video_kv_tiles=int(is_real[: first_tail_slot // kv_tile].sum()),
        num_real_kv_tiles=int(is_real.sum()),
        audio_query_tiles=tuple((audio_slots // query_tile).unique().tolist()),
        reference_kv_tiles=tuple(
            range(-(-slot // kv_tile), (slot + segment.num_rows) // kv_tile)
            for slot, segment in zip(first_slots, references, strict=True)
        ),
    )


def raster_layout(
    sequence: Sequence, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Video tokens in their packed order, then the tail."""
    rows = torch.arange(sequence.video_start, sequence.num_rows)
    return _tile_layout(RASTER, sequence, rows, query_tile, kv_tile)


def window_layout(
    sequence: Sequence, shape: TileShape, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Video tokens grouped into 3D windows of `shape` (`window_order`), then the tail.

    Raises:
        RequestError: The shape does not hold `query_tile` tokens.
    """
    _check_size(shape, query_tile)
    rows = sequence.video_start + window_order(sequence.token_grid, shape)
    return _tile_layout(str(shape), sequence, rows, query_tile, kv_tile)


def veda_layout(
    sequence: Sequence,
    shape: TileShape,
    *,
    tile_conditions: bool = False,
    query_tile: int = QUERY_TILE,
    kv_tile: int = KV_TILE,
) -> TileLayout:
    """Veda's tiles: padded boxes of `shape` (`tile_order`), then the tail, Veda's global tiles.

    Args:
        sequence: The packed sequence.
        shape: Of the target video's tiles.
        tile_conditions: Visual conditions become tiles too, before the target's and each in its
            `least_padding_shape`.
        query_tile: Slots of a query tile.
        kv_tile: Slots of a KV tile.

    Raises:
        RequestError: The shape does not hold `query_tile` tokens, or the grid of a condition that
            must be tiled is unknown.
    """
    _check_size(shape, query_tile)
    slots = []
    for segment in sequence.segments[:-1] if tile_conditions else ():
        if segment.kind not in ("cond", "ref_img"):
            continue
        if segment.grid is None:
            raise RequestError(
                f"This Veda predictor tiles conditions, but rows {segment.start} to "
                f"{segment.stop} ({segment.kind}) do not form a grid. Use mode sparse."
            )
        order = tile_order(segment.grid, least_padding_shape(segment.grid, query_tile))
        slots.append(torch.where(order < 0, order, order + segment.start).flatten())
    num_condition_tiles = sum(map(len, slots)) // query_tile
    order = tile_order(sequence.token_grid, shape)
    slots.append(torch.where(order < 0, order, order + sequence.video_start).flatten())
    return _tile_layout(
        f"veda {shape}", sequence, torch.cat(slots), query_tile, kv_tile, num_condition_tiles
    )


def packed_layout(
    sequence: Sequence, query_tile: int = QUERY_TILE, kv_tile: int = KV_TILE
) -> TileLayout:
    """Every row in packed order with no split: what SageAttention itself tiles.

    Only for attention that keeps every tile; all rows count as video here.
    """
    rows = torch.arange(sequence.num_rows)
    return _tile_layout("packed", sequence, rows, query_tile, kv_tile)


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


def _check_size(shape: TileShape, query_tile: int) -> None:
    if math.prod(shape) != query_tile:
        raise RequestError(f"Tile shape {shape} does not hold {query_tile} tokens.")
