"""The tensors of a model one after the other in few arrays, so that they are copied, compared and moved as one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

HELD_BYTES, HELD_STATES = 1 << 29, 4
"""Bytes and number up to which older policy versions than the newest stay in memory, for the engine of a process."""

_PATTERNS: dict[int, tuple[torch.dtype, type[Any]]] = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
"""By the bytes of an element: what torch and numpy call its bit pattern."""


def most_held(size: int) -> int:
    """Bytes of the states that are in memory when one of `size` bytes is published: those held, and the new one."""
    return size * (1 + max(1, min(HELD_STATES, HELD_BYTES // size)))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where a tensor lies: its elements begin at `start` in the array of its element size."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def kind(self) -> str:
        """Type and shape for people."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """A state of a model: bit patterns in host memory, and what each tensor's are.

    `patterns` holds an array for each element size in bytes, `[elements]` of all tensors of that size in the order of
    their names.
    """

    layout: Mapping[str, TensorLayout]
    patterns: Mapping[int, npt.NDArray[Any]]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> FlatWeights:
        """A copy of tensors on any device; raises ValueError that names one whose elements have another size."""
        layout: dict[str, TensorLayout] = {}
        ends = dict.fromkeys(_PATTERNS, 0)
        for name in sorted(tensors):
            tensor = tensors[name]
            size = tensor.element_size()
            if size not in ends:
                raise ValueError(f"tensor {name} is of {tensor.dtype}; weights have two or four bytes an element")
            layout[name] = TensorLayout(tensor.dtype, tuple(tensor.shape), ends[size])
            ends[size] += tensor.numel()
        flat = cls(layout, {size: np.empty(end, _PATTERNS[size][1]) for size, end in ends.items() if end})
        for name, view in flat.tensors().items():
            view.copy_(tensors[name].detach())
        return flat

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, which share the memory of `patterns`."""
        return {name: self._view(spec) for name, spec in self.layout.items()}

    def copy(self) -> FlatWeights:
        """The same state in memory of its own."""
        return FlatWeights(self.layout, {size: array.copy() for size, array in self.patterns.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(array.nbytes for array in self.patterns.values())

    def check_same_tensors(self, new: FlatWeights) -> None:
        """Raise ValueError that names the tensors which are there once only, or have another type or shape."""
        before = {name: spec.kind for name, spec in self.layout.items()}
        now = {name: spec.kind for name, spec in new.layout.items()}
        changed = [
            f"{name} ({before.get(name, 'absent')} before, {now.get(name, 'absent')} now)"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ValueError(f"the tensors of the two states differ: {', '.join(changed[:3])}{more}")

    def _view(self, spec: TensorLayout) -> torch.Tensor:
        size = spec.dtype.itemsize
        if not math.prod(spec.shape):
            return torch.empty(spec.shape, dtype=spec.dtype)
        signed = self.patterns[size].view(f"i{size}")[spec.start : spec.start + math.prod(spec.shape)]
        return torch.from_numpy(signed).view(spec.dtype).view(spec.shape)
