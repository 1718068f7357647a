"""What Hugging Face's `datasets` reads: Parquet, JSON, CSV with words, WebDataset's shards, folders of images..."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from hpcdist.data.importers import as_targets, padded, random_splits
from hpcdist.data.writer import Block, Split, create
from hpcdist.errors import ConfigError, DataError, UnknownNameError, require_packages
from hpcdist.records import open_regular, writing

MODES = ("RGB", "L")
BLOCK = 64  # samples held in memory at once
HUB = "hub:"
SAVED = ("state.json", "dataset_dict.json")  # by save_to_disk


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    x: str = "image",
    y: str = "label",
    task: str = "",
    height: int = 64,
    width: int = 64,
    mode: str = "RGB",
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write two columns of what `datasets.load_dataset` reads.

    Images are stored as uint8 and read as float32 in 0..1. Whole numbers are int64, others float32. Lists of different
    lengths, and texts as their bytes in UTF-8, are padded with zeros to the longest.

    Args:
        source: A file (.parquet, .csv, .json, .jsonl, .tar...), or a folder of such files, of images with a folder per
            class, or of `save_to_disk`; folders or files called train, test, val are its splits. hub:NAME is a data set
            on the Hugging Face Hub.
        destination: The file to write.
        x: The column of samples, or columns of numbers with commas between. Parts of a column are COLUMN.PART. Bytes
            are an image file's, PNG's or JPEG's for example.
        y: The column of targets.
        task: "classification" or "regression"; by default classes, words and integers are labels.
        height, width: Size in pixels that every image is resized to (bilinear; its proportions change).
        mode: "RGB", or "L" for shades of grey.
        test_fraction: Part of each class that is kept for testing, where the source has no split for it.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    if mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}; got {mode!r}.")
    if height < 1 or width < 1:
        raise ConfigError(f"height and width must be at least 1; got {height} and {width}.")
    require_packages("the importer datasets", "datasets", "datasets")
    destination, columns = Path(destination).absolute(), x.split(",")
    read = partial(_array, columns, (width, height), mode)
    with writing(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".import-", dir=destination.parent, ignore_cleanup_errors=True)
    with scratch:  # to which the library copies what it reads
        parts = _splits(str(source), scratch.name, columns)
        features = parts["train"].features
        if unknown := [name for name in (*columns, y) if name not in features]:
            if [*features] == ["image"]:
                raise DataError(
                    f"{source} must have a folder of images for each class, and two or more; got no classes."
                )
            raise UnknownNameError(f"x and y of {source}", unknown[0], features)
        # dtype None: as stored. The format's own types, int64 and float32, merge or change large labels.
        targets = [np.array(part.with_format("numpy", dtype=None)[y][:]) for part in parts.values()]
        names = getattr(features[y], "names", [])
        labels, names = (targets, names) if names else as_targets(task, f"{y} of {source}", targets)
        labels = [each.astype(np.float32 if each.dtype.kind == "f" else np.int64) for each in labels]
        by_name = dict(zip(parts, labels, strict=True))
        parts = {name: part.select_columns(columns) for name, part in parts.items()}
        drawn = len(parts) == 1
        if drawn:
            own = random_splits(len(labels[0]), test_fraction, seed, labels[0] if names else None)
            by_name = {name: labels[0][chosen] for name, chosen in own.items()}
            parts = {name: parts["train"].select(chosen) for name, chosen in own.items()}
        first, longest = read(parts["train"][0]), 0
        if first.dtype != np.uint8:
            longest = max(len(read(sample)) for part in parts.values() for sample in part)
        return create(
            destination,
            {name: Split(len(part), _blocks(part, by_name[name], read, longest)) for name, part in parts.items()},
            task="classification" if names else "regression",
            source=f"{Path(source).name}, {x} and {y}",
            classes=names,
            scale=1 / 255 if first.dtype == np.uint8 else None,
            notes={"test_fraction": test_fraction, "seed": seed} if drawn else {},
            compression=compression,
        )


def _splits(source: str, cache: str, x: Sequence[str]) -> dict[str, Any]:
    """Load a data set's splits by name, with undecoded images, also in columns `x` of bytes, and nested columns flat.

    Without a split "test" the one for validation gets this name.
    """
    import datasets  # takes seconds

    path = Path(source)
    if not source.startswith(HUB) and not path.exists():
        raise DataError(f"{path} must be a file or a folder; there is none. A data set on the Hub is {HUB}NAME.")
    try:
        datasets.disable_progress_bars()
        if any((path / name).exists() for name in SAVED):
            loaded = datasets.load_from_disk(source)
        elif path.is_file():
            loaded = datasets.load_dataset(str(path.absolute().parent), data_files=path.name, cache_dir=cache)
        else:
            loaded = datasets.load_dataset(source.removeprefix(HUB), cache_dir=cache)
    except Exception as error:  # the library's own, and those of the readers that it calls
        cause = error.__cause__ or error
        raise DataError(
            f"{source} must be what Hugging Face's datasets reads; got {type(cause).__name__}: {cause}"
        ) from error
    parts = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in parts:
        raise DataError(f"{source} must have a split train; got {', '.join(parts)}. Rename its files or folders.")
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    # Decoded while `flatten` runs, which splits undecoded images into bytes and path; then undecoded.
    for decode in (True, False):
        for name, feature in parts["train"].features.items():
            encoded = name in x and getattr(feature, "dtype", "") in ("binary", "large_binary")
            encoded |= name in x and isinstance(feature, dict) and feature.keys() == {"bytes", "path"}
            if encoded or isinstance(feature, datasets.Image):
                parts = {key: part.cast_column(name, datasets.Image(decode=decode)) for key, part in parts.items()}
        if decode:
            parts = {key: part.flatten() for key, part in parts.items()}
    return parts


def _blocks(part: Any, y: np.ndarray, read: Callable[[Any], np.ndarray], longest: int) -> Iterator[Block]:
    # Yield blocks of samples, converted by `read` and padded to `longest` (0: they have one shape), with their targets.
    for start in range(0, len(part), BLOCK):
        samples = [read(sample) for sample in part.select(range(start, min(start + BLOCK, len(part))))]
        yield padded(samples, longest) if longest else np.stack(samples), y[start : start + BLOCK]


def _array(columns: Sequence[str], size: tuple[int, int], mode: str, sample: dict[str, Any]) -> np.ndarray:
    """Convert a sample: an image to uint8 (channels, height, width), numbers and texts to int64 or float32."""
    values = [sample[name] for name in columns]
    value = values[0] if len(values) == 1 else values
    if isinstance(value, dict) and "bytes" in value:
        return _pixels(value, size, mode)
    try:
        array = np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value)
        return np.atleast_1d(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"x must be an image, a text, or numbers in each sample, several columns numbers; got {value!r:.80} in "
            f"{', '.join(columns)} ({error}). Fill or remove it; words among numbers are for the importer table."
        ) from None


def _pixels(image: dict[str, Any], size: tuple[int, int], mode: str) -> np.ndarray:
    """Read one image as uint8 (channels, height, width)."""
    try:
        with open_regular(image["path"]) if image["bytes"] is None else io.BytesIO(image["bytes"]) as file:
            with Image.open(file) as stored:
                if stored.mode[0] in "IF":
                    raise ValueError(f"it has mode {stored.mode}, more than the 8 bits that are kept")
                upright = ImageOps.exif_transpose(stored).convert(mode)
                pixels = np.asarray(upright.resize(size, Image.Resampling.BILINEAR))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # as Pillow's decoders raise
        raise DataError(
            f"{image['path'] or 'bytes of x'} can't be read as an image ({error}). Replace or remove it."
        ) from error
    return pixels[np.newaxis] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
