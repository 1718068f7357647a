"""A tree of image files with one folder per class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from hpcdist.data.importers import draw_splits, need_folder
from hpcdist.data.writer import Block, Split, create
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import open_regular

MODES = ("RGB", "L")
BLOCK = 64  # images held in memory at once
Labelled = tuple[Path, int]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    height: int = 64,
    width: int = 64,
    mode: str = "RGB",
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write all images below a folder: x (3 or 1, height, width), stored as uint8, read as float32 in 0..1; y int64.

    The folders' names, sorted, are the classes. Hidden files are left out; any other file must be an image.

    Args:
        source: A folder with one folder per class; or with the folders `train` and `test`, each with one per class.
        destination: The file to write.
        height, width: Size in pixels that every image is resized to (bilinear; its proportions change).
        mode: "RGB", or "L" for shades of grey.
        test_fraction: Part of each class that is kept for testing, where `source` has no `train` and `test`.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    if mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}; got {mode!r}.")
    if height < 1 or width < 1:
        raise ConfigError(f"height and width must be at least 1; got {height} and {width}.")
    folder = need_folder(source, "Name one with a folder of images per class.")
    separate = all((folder / name).is_dir() for name in ("train", "test"))
    classes = _class_names(folder / "train" if separate else folder)
    if separate:
        if others := [path.name for path in _visible(folder) if path.is_dir() and path.name not in ("train", "test")]:
            raise DataError(f"{folder} must have no folders beside train and test; got {', '.join(others)}. Move them.")
        parts = {name: _list_images(folder / name, classes) for name in ("train", "test")}
    else:
        everything = _list_images(folder, classes)
        labels = np.array([label for _, label in everything])
        drawn_parts = draw_splits(len(everything), test_fraction, seed, labels)
        parts = {name: [everything[i] for i in own] for name, own in drawn_parts.items()}
    drawn = {} if separate else {"test_fraction": test_fraction, "seed": seed}
    return create(
        destination,
        {name: Split(len(images), _blocks(images, mode, (width, height))) for name, images in parts.items()},
        task="classification",
        source=f"image files {folder.name}",
        classes=classes,
        scale=1 / 255,
        notes={"resized": "bilinear", "mode": mode, **drawn},
        compression=compression,
    )


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in _visible(folder) if path.is_dir())
    if not names:
        raise DataError(f"{folder} must have one folder per class; it has none.")
    return names


def _list_images(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    """List all images below the class folders of `folder`, each with its label."""
    suffixes = Image.registered_extensions()
    if unknown := [path.name for path in _visible(folder) if path.name not in classes or not path.is_dir()]:
        raise DataError(f"{folder} must have nothing but the folders {', '.join(classes)}; got {', '.join(unknown)}.")
    images = []
    for label, name in enumerate(classes):
        paths = _visible(folder / name) if (folder / name).is_dir() else []
        if not paths:
            raise DataError(f"{folder / name} must have at least 1 image; got none. Add some, or remove the class.")
        for path in paths:
            if path.suffix.lower() not in suffixes:
                raise DataError(f"{path} must be an image in a format that Pillow knows. Move it elsewhere.")
            images.append((path, label))
    return images


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _blocks(images: Sequence[Labelled], mode: str, size: tuple[int, int]) -> Iterator[Block]:
    for start in range(0, len(images), BLOCK):
        part = images[start : start + BLOCK]
        yield np.stack([_read(path, mode, size) for path, _ in part]), np.array([label for _, label in part])


def _read(path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    """Read one image as uint8 (channels, height, width)."""
    try:
        with open_regular(path) as file, Image.open(file) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"it has mode {image.mode}, more than the 8 bits that are kept")
            upright = ImageOps.exif_transpose(image).convert(mode)
            pixels = np.asarray(upright.resize(size, Image.Resampling.BILINEAR))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's decoders raise
        raise DataError(f"{path} can't be read as an image ({error}). Replace or remove it.") from error
    return pixels[np.newaxis] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
