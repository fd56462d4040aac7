"""How do image files become pixels of one shape?

The driver decodes a few of the files that `image_files` finds; all others are decoded when taken, in workers or in Ray
Data's processes, where a damaged file is named with its row. Pillow decodes, and is imported when first needed. Draws
nothing at random: augmentation belongs in the task's `transform`.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pyarrow import fs

from raytrain.data.image_files import ImageFiles, find_images
from raytrain.data.in_memory import ArraySource
from raytrain.data.source import Columns, Seed
from raytrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

Mode = Literal["RGB", "L"]
Fit = Literal["stretch", "crop"]
Size = tuple[int, int]
"""Height and width in pixels."""
Value = TypeVar("Value")

FORMATS = ("PNG", "JPEG", "WEBP")
CHANNELS = {"RGB": 3, "L": 1}
CHECKED_ROWS = 4  # decoded where the source is built
HEADER_THREADS = 8
OPAQUE, WITH_ALPHA = ("1", "L", "P", "RGB", "CMYK"), ("LA", "PA", "RGBA")  # Pillow's modes with 8 bits per channel or less
ORIENTATION = 0x0112  # EXIF's tag
TURNS = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))
"""Pillow's `Image.Transpose` that undoes each orientation but 1; JEITA CP-3451, 4.6.4 A."""
SIDES_SWAPPED = (5, 6, 7, 8)  # orientations
DAMAGED = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error)
"""What Pillow raises for damaged files."""


@dataclass(frozen=True)
class Decoder:
    """How a file becomes pixels; see `images`.

    Args:
        mode: Pillow's mode of the pixels.
        size: height and width; None for those of the file.
        fit: how a file of another shape comes to this size.
    """

    mode: Mode
    size: Size | None
    fit: Fit

    def pixels(self, data: bytes) -> NDArray[np.uint8]:
        """The pixels of a file, of shape [channels, height, width].

        Raises:
            DAMAGED: what Pillow raises for a damaged file; ValueError for one that has no 8-bit pixels.
        """
        from PIL import Image, ImageOps

        with _opened(io.BytesIO(data)) as image:
            plain = _opaque(image).convert(self.mode)
            orientation = image.getexif().get(ORIENTATION)
        if orientation in TURNS:
            plain = plain.transpose(Image.Transpose(TURNS[orientation]))
        if self.size is not None and plain.size != self.size[::-1]:
            bilinear = Image.Resampling.BILINEAR
            wanted = self.size[::-1]
            plain = ImageOps.fit(plain, wanted, bilinear) if self.fit == "crop" else plain.resize(wanted, bilinear)
        return np.asarray(plain).reshape(plain.height, plain.width, CHANNELS[self.mode]).transpose(2, 0, 1)


class ImageSource:
    """Image files, decoded when taken, and the columns that go with them; see `images`.

    Attributes:
        classes: names of the classes, in the order of their numbers in the label's column; None without such a column.
        left_out: for each column of the table that cannot become a tensor, the reason.
    """

    chunk_rows: tuple[int, ...] | None = None
    runs_user_code = False
    decodes = True

    def __init__(self, files: ImageFiles, decoder: Decoder) -> None:
        self._files, self._decoder = files, decoder
        self.num_rows, self.classes, self.left_out = len(files.names), files.classes, files.left_out
        self.columns: Sequence[str] = ("image", *files.columns)
        height, width = decoder.size or self._one_size()
        self._shape = (CHANNELS[decoder.mode], height, width)
        self.take(np.unique(np.linspace(0, self.num_rows - 1, CHECKED_ROWS).astype(np.int64)))

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order; `image` is uint8 of shape [rows, channels, height, width].

        Raises:
            DataError: a file is missing, damaged, or has no 8-bit pixels.
        """
        taken = np.empty((len(row_ids), *self._shape), np.uint8)
        for position, row in enumerate(row_ids.tolist()):
            pixels = self._read(row, lambda file: self._decoder.pixels(file.read()))
            if pixels.shape != self._shape:
                raise self._unlike(row, pixels.shape[1:], f"{self._shape[1]} x {self._shape[2]} when the run began")
            taken[position] = pixels
        return {"image": taken} | {name: values[row_ids] for name, values in self._files.columns.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Totals, how files are decoded, classes, a digest of names and sizes of the files, and of each other column."""
        names_and_sizes = list(zip(self._files.names, self._files.sizes.tolist(), strict=True))
        columns = self._files.columns
        return {
            "kind": "images",
            "rows": self.num_rows,
            "bytes": int(self._files.sizes.sum()),
            "image": f"{self._decoder.mode} {list(self._shape)} {self._decoder.fit}",
            "classes": ", ".join(self.classes or ()),
            "digest": hashlib.blake2b(repr(names_and_sizes).encode(), digest_size=16).hexdigest(),
        } | ({key: text for key, text in ArraySource(columns).fingerprint().items() if "column" in key} if columns else {})

    def _read(self, row: int, read: Callable[[Any], Value]) -> Value:
        """What `read` returns for the open file of a row."""
        from PIL.Image import DecompressionBombError

        try:
            with self._files.filesystem.open_input_file(self._files.path(row)) as file:
                return read(file)
        except (*DAMAGED, DecompressionBombError) as error:
            found = str(error).partition("\n")[0].partition(" <")[0] or type(error).__name__
            rule = "is a whole PNG, JPEG or WebP image with up to 8 bits per channel"
            fix = "write it anew as such, or leave it out"
            raise DataError(f"data, row {row}, file {self._files.path(row)}", found, rule, fix) from error

    def _one_size(self) -> Size:
        """Height and width of all images, from the header of each."""
        with ThreadPoolExecutor(HEADER_THREADS) as pool:
            sizes = list(pool.map(lambda row: self._read(row, _header_size), range(self.num_rows)))
        for row, size in enumerate(sizes):
            if size != sizes[0]:
                raise self._unlike(row, size, f"{sizes[0][0]} x {sizes[0][1]} in {self._files.path(0)}")
        return sizes[0]

    def _unlike(self, row: int, size: Sequence[int], first: str) -> DataError:
        where, found = f"data, row {row}, file {self._files.path(row)}", f"height x width of {size[0]} x {size[1]}"
        return DataError(where, found, f"all images have one size: {first}", "give images(..., size=(height, width))")


def images(
    folder_or_table: Any,
    *,
    size: Size | None = None,
    mode: Mode = "RGB",
    fit: Fit = "stretch",
    path: str = "path",
    label: str = "label",
    root: str | PathLike[str] | None = None,
    classes: Sequence[str] | None = None,
    filesystem: fs.FileSystem | None = None,
) -> ImageSource:
    """A source over PNG, JPEG and WebP files, with the columns `image`, uint8 [channels, height, width], and their labels.

    A folder's subfolders are its classes: `label` is int64, the number of the subfolder in the order of their names; without
    subfolders there is no label. Hidden files are passed over, others that are no images are refused.

    A table names a file per row. Its numeric columns come along; the text column `label` becomes int64, the number of the
    text in the order of all texts; other text columns are left out.

    Pixels are turned as EXIF says. Transparent ones are laid on black, grey ones become RGB by repetition, RGB becomes grey
    by ITU-R 601 luma, and CMYK becomes RGB without color management. Resizing is bilinear with antialiasing. Animations and
    more than 8 bits per channel are refused. JPEG and WebP have no checksums: damage inside of them may go unnoticed.

    Args:
        folder_or_table: path or URI of a folder or of a CSV file with a header; or columns by name, or a DataFrame.
        size: height and width to which images are resized; None where all have one size, for which each header is read.
        mode: "RGB" for 3 channels, "L" for 1, grey.
        fit: "stretch" does not keep the aspect ratio; "crop" keeps it, and cuts off the margins that are too much.
        path: the table's column of paths.
        label: the table's column of labels.
        root: directory that paths in the table start from; by default that of the CSV file, or the current one.
        classes: names of the classes by number; `valid` gets the classes of `train`, where it may lack some.
        filesystem: filesystem of the paths, if they are neither local nor URIs.

    Raises:
        DataError: Pillow is not installed, a path is missing, a file is no image or damaged, there are no rows, images
            differ in size, or labels are not among `classes`.
    """
    decoder = _decoder(mode, size, fit)
    return ImageSource(find_images(folder_or_table, path, label, root, classes, filesystem), decoder)


def _decoder(mode: Any, size: Any, fit: Any) -> Decoder:
    """The decoder with these settings, if Pillow is there."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        rule, fix = "Pillow is installed, which decodes images", "pip install 'raytrain[images]'"
        raise DataError("images()", "no Pillow", rule, fix) from None
    for name, value, allowed in (("mode", mode, ("RGB", "L")), ("fit", fit, ("stretch", "crop"))):
        if value not in allowed:
            raise DataError(f"images({name}=...)", repr(value), " or ".join(map(repr, allowed)), f"give {allowed[0]!r}")
    if size is not None:
        is_pair = isinstance(size, (tuple, list)) and len(size) == 2
        if not is_pair or not all(isinstance(side, int) and side > 0 for side in size):
            raise DataError(
                "images(size=...)", repr(size), "is height and width in pixels", "give a pair, such as (224, 224)"
            )
    return Decoder(mode, size and (size[0], size[1]), fit)


def _opened(file: Any) -> ImageFile:
    """A file of which the header is read."""
    from PIL import Image

    return Image.open(file, formats=FORMATS)


def _header_size(file: Any) -> Size:
    """Height and width of an image when it is turned as EXIF says; PNG's EXIF after the pixels would have them decoded."""
    with _opened(file) as image:
        is_cheap = image.format != "PNG" or "exif" in image.info
        is_swapped = is_cheap and image.getexif().get(ORIENTATION) in SIDES_SWAPPED
        return (image.width, image.height) if is_swapped else (image.height, image.width)


def _opaque(image: ImageFile) -> Image:
    """The same image on black, where it is transparent. Raises ValueError for one that would lose more than that."""
    from PIL import Image

    if getattr(image, "is_animated", False) and image.format != "MPO":  # a JPEG with further views
        raise ValueError("an animation")
    if image.mode not in (*OPAQUE, *WITH_ALPHA) or any(";16" in str(tile[3]) for tile in image.tile):
        raise ValueError("more than 8 bits per channel")
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        return Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
    return image
