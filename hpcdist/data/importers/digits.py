"""Handwritten digits, 8 x 8 pixels, as shipped with scikit-learn: 1797 real samples without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from hpcdist.data.importers import random_splits
from hpcdist.data.writer import Split, create
from hpcdist.errors import ConfigError

INCLUDED = "sklearn"


def convert(
    source: str | Path | None,
    destination: str | Path,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write scikit-learn's handwritten digits: x (1, 8, 8), stored as uint8, read as float32 in 0..1; y int64.

    Args:
        source: "sklearn" or None, since the data come with the package.
        destination: The file to write.
        test_fraction: Part of each digit's samples that is kept for testing.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".

    Reference: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    1998.
    """
    if source not in (None, INCLUDED):
        raise ConfigError(f"source must be {INCLUDED!r}: these data come with scikit-learn; got {str(source)!r}.")
    digits = load_digits()
    x = digits.images.astype(np.uint8)[:, np.newaxis]  # whole numbers in 0..16
    y = digits.target.astype(np.int64)
    return create(
        destination,
        {name: Split.of(x[own], y[own]) for name, own in random_splits(len(y), test_fraction, seed, y).items()},
        task="classification",
        source="scikit-learn, load_digits",
        classes=[str(name) for name in digits.target_names],
        scale=1 / 16,
        notes={"test_fraction": test_fraction, "seed": seed},
        compression=compression,
    )
