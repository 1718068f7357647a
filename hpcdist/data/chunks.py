"""How samples lie in an HDF5 file: the size of chunks, and where each one begins."""

from __future__ import annotations

import h5py
import numpy as np

TARGET_BYTES = 512 << 10  # a chunk has half of it to all of it; fewer, larger reads suit parallel file systems


def preferred_chunk_samples(sample_bytes: int, samples: int) -> int:
    """Whole samples per chunk such that a chunk has 256 to 512 KiB, where the samples allow it."""
    return max(1, min(samples, TARGET_BYTES // sample_bytes))


def samples_per_chunk(dataset: h5py.Dataset) -> int:
    """Samples that are stored (or, in a contiguous dataset, best read) together."""
    if dataset.chunks:
        return dataset.chunks[0]
    return preferred_chunk_samples(dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])), len(dataset))


def chunk_offsets(dataset: h5py.Dataset) -> np.ndarray | None:
    """Bytes from the start of the file to each `samples_per_chunk` samples: int64, in order.

    None where the bytes in the file are not the values (compressed, split along another dimension, kept elsewhere,
    never written) or HDF5 does not tell: then only HDF5 can read them.
    """
    if dataset.file.driver != "sec2" or dataset.file.userblock_size or dataset.is_virtual or dataset.external:
        return None
    chunk_samples = samples_per_chunk(dataset)
    chunk_bytes = chunk_samples * dataset.dtype.itemsize * int(np.prod(dataset.shape[1:]))
    chunks = -(-len(dataset) // chunk_samples)
    if not dataset.chunks:
        start = dataset.id.get_offset()
        return None if start is None else start + chunk_bytes * np.arange(chunks)
    plain = dataset.id.get_create_plist().get_nfilters() == 0 and dataset.chunks[1:] == dataset.shape[1:]
    if not plain or not hasattr(dataset.id, "chunk_iter") or dataset.id.get_num_chunks() != chunks:
        return None  # HDF5 before 1.12.3 can't iterate
    offsets = np.full(chunks, -1, dtype=np.int64)

    def note(chunk) -> None:
        if chunk.size == chunk_bytes:
            offsets[chunk.chunk_offset[0] // chunk_samples] = chunk.byte_offset

    dataset.id.chunk_iter(note)
    return None if (offsets < 0).any() else offsets
