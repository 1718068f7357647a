"""Fashion-MNIST: MNIST's four files with images of clothes, and their ten kinds as classes."""

from __future__ import annotations

from pathlib import Path

from hpcdist.data.importers import mnist

CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


def convert(source: str | Path, destination: str | Path, *, compression: str | None = None) -> Path:
    """Write Fashion-MNIST from its four files, as `mnist.convert` does.

    Args:
        source: The folder with the files, see `mnist.convert`.
        destination: The file to write.
        compression: None, "gzip" or "lzf".

    Reference: H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine learning
    algorithms, 2017.
    """
    return mnist.convert(source, destination, classes=CLASSES, compression=compression)
