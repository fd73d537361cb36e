"""Digests that tell whether bytes and tensors are what was written."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

_CHUNK = 1 << 24


def bytes_digest(data: bytes) -> str:
    """xxh3-128 of bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's elements in row-major order, whatever its device and strides."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(memoryview(flat.view(torch.uint8).numpy().data))
