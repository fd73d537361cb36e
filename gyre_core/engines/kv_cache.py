"""A key-value cache whose rows have lengths of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[rows, heads, slots, head_size]`."""
_CHUNK = 16
"""Slots are held and read in multiples of this: attention is slower over a rest that fills no vector register."""


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values; the token at position p of a sequence lies in slot p of its row."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.rows = self.slots = torch.empty(0, dtype=torch.int64)
        self.extent = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token a row, `[rows, heads, 1, head_size]`, and return the slots in use of those rows."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[self.rows, :, self.slots] = key_states.squeeze(2)
        self.values[self.rows, :, self.slots] = value_states.squeeze(2)
        rows = len(self.rows)
        return self.keys[:rows, :, : self.extent], self.values[:rows, :, : self.extent]

    def reserve(self, rows: int, slots: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Hold at least this many rows and slots, in the type and head shape of `like`."""
        self.keys = _grown(self.keys, rows, slots, like[0])
        self.values = _grown(self.values, rows, slots, like[1])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: memory is there before the model runs."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The slots that a mask covers, and where it begins."""
        return self.extent, 0

    def get_seq_length(self) -> int:
        """Slots in use before the token that is being written."""
        return self.extent - 1

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1


class SlotCache(Cache):
    """Keys and values of the sequences in flight: row r is sequence r, slot p its position p.

    Rows `[0, n)` are in use; there are no holes among them, so that the model computes nothing in vain.
    """

    def __init__(self, layers: int) -> None:
        self._slot_layers = [_SlotLayer() for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def place(self, prefix: KeysValues, sources: torch.Tensor, first_row: int) -> None:
        """Copy the prefixes `sources`, `[count]`, to the rows from `first_row` on."""
        end = first_row + len(sources)
        for layer, (keys, values) in zip(self._slot_layers, prefix, strict=True):
            layer.reserve(end, keys.shape[2], (keys, values))
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys[first_row:end, :, : keys.shape[2]] = keys[sources]
            layer.values[first_row:end, :, : values.shape[2]] = values[sources]

    def move(self, sources: torch.Tensor, targets: torch.Tensor, slots: int) -> None:
        """Copy the first `slots` tokens of the rows `sources` to the rows `targets`."""
        for layer in self._slot_layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys[targets, :, :slots] = layer.keys[sources, :, :slots]
            layer.values[targets, :, :slots] = layer.values[sources, :, :slots]

    def aim(self, positions: torch.Tensor, extent: int) -> torch.Tensor:
        """Have the next forward pass write row r's token at `positions[r]`, all below `extent`.

        Returns its attention mask, `[rows, 1, 1, slots]`, true where a row's token may look.
        """
        extent = _whole_chunks(extent)
        rows = torch.arange(len(positions), device=positions.device)
        for layer in self._slot_layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.reserve(len(positions), extent, (layer.keys, layer.values))
            layer.rows, layer.slots, layer.extent = rows, positions, extent
        return (torch.arange(extent, device=positions.device) <= positions[:, None])[:, None, None]


def _grown(tensor: torch.Tensor | None, rows: int, slots: int, like: torch.Tensor) -> torch.Tensor:
    held_rows, held_slots = (0, 0) if tensor is None else (tensor.shape[0], tensor.shape[2])
    if tensor is not None and rows <= held_rows and slots <= held_slots:
        return tensor
    if slots > held_slots:
        slots = _whole_chunks(max(slots, held_slots * 3 // 2))
    if rows > held_rows:
        rows = max(rows, held_rows * 3 // 2)
    # Zeros, because a masked slot still takes part in a product, and what lies in fresh memory may be no number.
    grown = like.new_zeros(max(rows, held_rows), like.shape[1], max(slots, held_slots), like.shape[3])
    if tensor is not None:
        grown[:held_rows, :, :held_slots] = tensor
    return grown


def _whole_chunks(slots: int) -> int:
    return -(-slots // _CHUNK) * _CHUNK
