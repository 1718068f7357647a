"""The chunks of a data set in an HDF5 file: their size, and their offsets in the file."""

from __future__ import annotations

import h5py
import numpy as np

TARGET_BYTES = 512 << 10  # a chunk has half of that to all of it: parallel file systems prefer few, large reads


def preferred_chunk_samples(sample_bytes: int, samples: int) -> int:
    """Choose the number of samples per chunk, so that a chunk has 256 to 512 KiB where the samples allow it."""
    return max(1, min(samples, TARGET_BYTES // sample_bytes))


def samples_per_chunk(dataset: h5py.Dataset) -> int:
    """Return the number of samples that are stored together or, in a contiguous dataset, are best read together."""
    if dataset.chunks:
        return dataset.chunks[0]
    return preferred_chunk_samples(dataset.dtype.itemsize * int(np.prod(dataset.shape[1:])), len(dataset))


def chunk_offsets(dataset: h5py.Dataset) -> np.ndarray | None:
    """Return the offset in the file of each chunk of `samples_per_chunk` samples, in bytes: int64, in order.

    None where the bytes in the file are not the values (compressed, split along another dimension, stored elsewhere,
    never written) or where HDF5 does not tell the offsets: then only HDF5 can read them.
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
