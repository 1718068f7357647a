"""Folders of image files, one folder per class, also below train, test or val."""

from __future__ import annotations

from pathlib import Path

from hpcdist.data.importers import datasets


def convert(
    source: str | Path, destination: str | Path, *, height: int = 64, width: int = 64, mode: str = "RGB",
    test_fraction: float = 0.2, seed: int = 0, compression: str | None = None,
) -> Path:  # fmt: skip
    """Write the images of a folder as uint8, read as float32 in 0..1; labels are the names of their folders.

    Args:
        source: A folder with a folder of images for each class, or with folders train and test, or train and val, that
            have those.
        destination: The file to write.
        height, width: Size in pixels that every image is resized to (bilinear; its proportions change).
        mode: "RGB", or "L" for shades of grey.
        test_fraction: Part of each class that is kept for testing, where there is no folder test or val.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    return datasets.convert(
        source, destination, height=height, width=width, mode=mode, test_fraction=test_fraction, seed=seed,
        compression=compression,
    )  # fmt: skip
