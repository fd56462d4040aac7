from __future__ import annotations

import pickle
import random
import struct
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageOps
from pyarrow import fs

from raytrain.data.image_source import ImageSource, images
from raytrain.errors import DataError
from tests.golden import check


def pixels(seed: int = 0, height: int = 4, width: int = 6, channels: int = 3) -> Any:
    return (
        np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8).squeeze(2 if channels == 1 else ())
    )


def save(path: Path, values: Any = None, **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = values if isinstance(values, Image.Image) else Image.fromarray(pixels() if values is None else values)
    image.save(path, **settings)
    return path


def shapes(directory: Path) -> Path:
    """Two classes of two images each."""
    for number, name in enumerate(("square/b.PNG", "circle/deep/a.png", "square/a.png", "circle/z.png")):
        save(directory / name, pixels(number))
    return directory


def csv(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def everything(source: ImageSource) -> dict[str, Any]:
    return source.take(np.arange(source.num_rows))


def one(path: Path, **settings: Any) -> Any:
    """The pixels of one image, of shape [height, width, channels]."""
    return images({"path": [path]}, **settings).take(np.array([0]))["image"][0].transpose(1, 2, 0)


def test_subfolders_are_classes_in_order_of_their_names(tmp_path: Path) -> None:
    save(shapes(tmp_path) / ".hidden" / "x.png")
    (tmp_path / "square" / ".DS_Store").write_text("")
    source = images(tmp_path)
    assert (source.classes, source.columns, source.num_rows) == (("circle", "square"), ("image", "label"), 4)
    taken = source.take(np.array([3, 0, 3, 1]))
    assert taken["label"].tolist() == [1, 0, 1, 0]
    assert taken["label"].dtype == np.int64
    assert taken["image"].dtype == np.uint8
    assert taken["image"].shape == (4, 3, 4, 6)
    for image, seed in zip(taken["image"], (0, 1, 0, 3), strict=True):
        assert image.tolist() == pixels(seed).transpose(2, 0, 1).tolist()


def test_given_classes_keep_their_numbers_where_some_have_no_images(tmp_path: Path) -> None:
    (shapes(tmp_path) / "empty").mkdir()
    source = images(tmp_path, classes=["triangle", "square", "empty", "circle"])
    assert everything(source)["label"].tolist() == [3, 3, 1, 1]
    assert source.classes == ("triangle", "square", "empty", "circle")


def test_a_folder_without_subfolders_has_no_labels(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    source = images(tmp_path)
    assert (source.columns, source.classes, list(everything(source))) == (("image",), None, ["image"])


LINES = "label,path,age,name", "square,square/b.PNG,3,x", "circle,circle/z.png,4,y", "square,square/a.png,5,z"


def table(tmp: Path, kind: str) -> ImageSource:
    shapes(tmp)
    path = csv(tmp / "labels.csv", *LINES)
    if kind == "csv":
        return images(path)
    if kind == "csv elsewhere":
        return images(csv(tmp / "far" / "labels.csv", *LINES), root=tmp)
    if kind == "uri":
        return images(f"file://{path}", root=f"file://{tmp}")
    if kind == "filesystem":
        return images("labels.csv", filesystem=fs.SubTreeFileSystem(str(tmp), fs.LocalFileSystem()))
    frame = pd.read_csv(path)
    if kind == "frame":
        return images(frame, root=tmp)
    columns = {name: frame[name].to_numpy() for name in frame}
    return images(columns | {"path": [tmp / name for name in frame["path"]]})


@pytest.mark.parametrize("kind", ["csv", "csv elsewhere", "uri", "filesystem", "frame", "dictionary"])
def test_a_table_names_files_and_its_numbers_and_labels_come_along(tmp_path: Path, kind: str) -> None:
    source = table(tmp_path, kind)
    taken = everything(source)
    assert (source.columns, source.classes) == (("image", "label", "age"), ("circle", "square"))
    assert (taken["label"].tolist(), taken["age"].tolist()) == ([1, 0, 1], [3, 4, 5])
    assert [image.tolist() for image in taken["image"]] == [pixels(i).transpose(2, 0, 1).tolist() for i in (0, 3, 2)]
    assert list(source.left_out) == ["name"]


def test_columns_of_a_table_may_have_other_names_and_shapes_and_numeric_labels_stay(tmp_path: Path) -> None:
    save(tmp_path / "0", format="PNG")
    given = {"file": ["0", "0"], "kind": ["b", "a"], "label": np.array([7, 5], "int32"), "joints": np.zeros((2, 17, 2))}
    source = images(given, path="file", label="kind", root=tmp_path)
    taken = everything(source)
    assert (taken["kind"].tolist(), taken["label"].dtype, taken["joints"].shape) == ([1, 0], np.int32, (2, 17, 2))
    assert images(csv(tmp_path / "t.csv", "path,label", "0,7")).classes is None


GREY, MASK = pixels(channels=1), np.eye(4, 6, dtype="u1")
CONVERTED = {
    "grey": (GREY, np.dstack([GREY] * 3)),
    "black and white": (GREY > 99, np.dstack([255 * (GREY > 99)] * 3)),
    "transparent": (np.dstack([pixels(), MASK * 255]), pixels() * MASK[..., None]),
    "grey and transparent": (np.dstack([GREY, MASK * 255]), np.dstack([GREY * MASK] * 3)),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_other_kinds_of_pixels_become_rgb(tmp_path: Path, kind: str) -> None:
    values, wanted = CONVERTED[kind]
    assert one(save(tmp_path / "a.png", values)).tolist() == wanted.tolist()


def test_a_transparent_color_of_a_palette_is_black(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], "u1"), "P")
    image.putpalette([10, 10, 10, 20, 20, 20, 30, 30, 30])
    assert one(save(tmp_path / "a.png", image, transparency=1))[..., 0].tolist() == [[10, 0], [30, 0]]


def test_cmyk_becomes_rgb_and_grey_has_one_channel(tmp_path: Path) -> None:
    flat = Image.new("CMYK", (6, 4), (0, 255, 255, 0))
    assert abs(one(save(tmp_path / "a.jpg", flat)).astype(int) - [255, 0, 0]).max() < 4
    grey = one(save(tmp_path / "a.png"), mode="L")
    assert (grey.shape, abs(grey[..., 0] - pixels() @ [0.299, 0.587, 0.114]).max() < 1) == ((4, 6, 1), True)


def test_the_first_of_several_views_in_a_jpeg_of_a_camera_is_the_image(tmp_path: Path) -> None:
    views = Image.new("RGB", (6, 4)), Image.new("RGB", (6, 4), "white")
    path = save(tmp_path / "a.jpg", views[0], format="MPO", save_all=True, append_images=[views[1]])
    assert not one(path).any()


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "webp", "png"])
def test_formats_and_suffixes(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"a.{suffix}", Image.new("RGB", (6, 4), (200, 100, 50)))
    assert images(tmp_path).take(np.array([0]))["image"].shape == (1, 3, 4, 6)
    assert abs(one(path).astype(int) - [200, 100, 50]).max() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_pixels_are_turned_as_exif_says(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"a.{suffix}", exif=exif)
    with Image.open(path) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image))
    assert one(path).tolist() == wanted.tolist()
    assert one(path, size=wanted.shape[:2]).tolist() == wanted.tolist()


def test_images_are_stretched_with_antialiasing_or_cropped(tmp_path: Path) -> None:
    stripes = np.zeros((8, 32, 3), "u1")
    stripes[:, ::2] = 200
    path = save(tmp_path / "a.png", stripes)
    inner = one(path, size=(8, 8))[:, 1:-1]
    assert (inner.shape, abs(inner.astype(int) - 100).max() <= 15) == ((8, 6, 3), True)
    assert one(path, size=(8, 8), fit="crop").tolist() == stripes[:, 12:20].tolist()
    assert one(path, size=(8, 32), fit="crop").tolist() == stripes.tolist()


def test_threads_and_other_processes_see_the_same(tmp_path: Path) -> None:
    source = images(shapes(tmp_path), size=(9, 5))
    wanted = everything(source)["image"].tolist()
    copy = pickle.loads(pickle.dumps(source))
    with ThreadPoolExecutor(4) as pool:
        assert [taken["image"].tolist() for taken in pool.map(everything, [source, copy] * 4)] == [wanted] * 8


def test_few_files_are_opened_where_the_size_is_given(tmp_path: Path) -> None:
    for i in range(20):
        save(tmp_path / f"{i:02}.png") if i in (0, 6, 12, 19) else (tmp_path / f"{i:02}.png").write_text("damaged")
    source = images(tmp_path, size=(4, 6))
    assert source.num_rows == 20
    with pytest.raises(DataError) as refused:
        source.take(np.array([19, 7]))
    check("errors/images_damaged.txt", f"{refused.value}\n".replace(str(tmp_path), "TMP"))
    with pytest.raises(DataError, match="data, row 1, file"):
        images(tmp_path)


def animation(path: Path) -> Path:
    return save(path, Image.new("RGB", (6, 4)), save_all=True, append_images=[Image.new("RGB", (6, 4), "white")])


def png(path: Path, width: int, height: int, bits: int) -> Path:
    """An RGB file with one row of pixels; written by hand, since Pillow writes 8 bits only."""
    parts = b"IHDR" + struct.pack(">2I5B", width, height, bits, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(13)), b"IEND"
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


BAD: dict[str, Callable[[Path], Any]] = {
    "missing": lambda tmp: images(tmp / "none"),
    "empty": images,
    "not_an_image": lambda tmp: images(csv(tmp / "notes.txt", "x").parent),
    "loose": lambda tmp: images(save(shapes(tmp) / "a.png").parent),
    "empty_class": lambda tmp: images(csv(shapes(tmp) / "empty" / ".hidden").parents[1]),
    "unknown_class": lambda tmp: images(shapes(tmp), classes=["circle"]),
    "class_twice": lambda tmp: images(shapes(tmp), classes=["circle", "square", "circle"]),
    "classes_without_labels": lambda tmp: images(save(tmp / "a.png").parent, classes=["a"]),
    "classes_of_numbers": lambda tmp: images({"path": [save(tmp / "a.png")], "label": [3]}, classes=["a"]),
    "no_table": lambda tmp: images(save(tmp / "a.png")),
    "array": lambda tmp: images(np.zeros((2, 3, 4, 6))),
    "broken_csv": lambda tmp: images(csv(tmp / "t.csv", "path,label", "a.png,1,2")),
    "empty_csv": lambda tmp: images(csv(tmp / "t.csv", "path,label")),
    "no_path": lambda tmp: images(csv(tmp / "t.csv", "paths,label", "a.png,1")),
    "path_gone": lambda tmp: images(csv(tmp / "t.csv", "path,label", f"{save(tmp / 'a.png')},1", "b/b.png,2")),
    "path_empty": lambda tmp: images(csv(tmp / "t.csv", "path,label", ",1")),
    "path_no_text": lambda tmp: images({"path": [3]}),
    "label_empty": lambda tmp: images(csv(tmp / "t.csv", "path,label", "a.png,", "a.png,x")),
    "label_null": lambda tmp: images(csv(tmp / "t.csv", "path,label", f"{save(tmp / 'a.png')},", "a.png,1")),
    "same_names": lambda tmp: images(csv(tmp / "t.csv", "path,label,label", "a.png,1,2")),
    "lengths": lambda tmp: images({"path": ["a.png"], "label": [1, 2]}),
    "named_image": lambda tmp: images({"path": ["a.png"], "image": [1]}),
    "sizes": lambda tmp: images(save(save(tmp / "a.png").parent / "b.png", pixels(height=5)).parent),
    "bad_size": lambda tmp: images(tmp, size=224),  # type: ignore[arg-type]
    "bad_mode": lambda tmp: images(tmp, mode="RGBA"),  # type: ignore[arg-type]
    "bad_fit": lambda tmp: images(tmp, fit="pad"),  # type: ignore[arg-type]
    "16_bit_grey": lambda tmp: one(save(tmp / "a.png", pixels(channels=1).astype("u2"))),
    "16_bit_rgb": lambda tmp: one(png(tmp / "a.png", 2, 1, bits=16)),
    "animation": lambda tmp: one(animation(tmp / "a.webp")),
    "gif": lambda tmp: one(save(tmp / "a.png", format="GIF")),
    "huge": lambda tmp: one(png(tmp / "a.png", 20000, 20000, bits=8)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_or_would_be_wrong_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(DataError) as refused:
        BAD[case](tmp_path)
    text = str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == text
    check(f"errors/images_{case}.txt", f"{text}\n".replace(str(tmp_path), "TMP"))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError) as refused:
        images("folder")
    check("errors/images_no_pillow.txt", f"{refused.value}\n")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a_damaged_file_is_named_or_only_its_pixels_differ(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, exif=Image.Exif())
    source, whole, draw = images(tmp_path), path.read_bytes(), random.Random(name)
    errors = []
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged[: draw.randrange(len(whole))] if draw.random() < 0.2 else damaged)
        try:
            assert source.take(np.array([0]))["image"].shape == (1, 3, 4, 6)
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert [text for text in errors if f"data, row 0, file {path}" not in text] == []


def test_an_image_of_another_size_than_before_is_refused_when_it_is_read(tmp_path: Path) -> None:
    source = images(save(tmp_path / "a.png").parent)
    save(tmp_path / "a.png", pixels(height=5))
    with pytest.raises(DataError, match=r"5 x 6\n.*4 x 6 when the run began"):
        source.take(np.array([0]))


def test_the_fingerprint_depends_on_files_labels_and_decoding_and_not_on_the_directory(tmp_path: Path) -> None:
    first = images(shapes(tmp_path / "one")).fingerprint()
    assert images(shapes(tmp_path / "two")).fingerprint() == first
    assert (first["rows"], first["image"], first["classes"]) == (4, "RGB [3, 4, 6] stretch", "circle, square")

    def differing(source: ImageSource) -> set[str]:
        return {key for key, value in source.fingerprint().items() if first.get(key) != value}

    assert differing(images(tmp_path / "one", mode="L")) == {"image"}
    assert differing(images(tmp_path / "one", classes=["square", "circle"])) == {"classes", "column label"}
    save(tmp_path / "two" / "square" / "c.png")
    assert differing(images(tmp_path / "two")) == {"rows", "bytes", "digest", "column label"}


def test_it_is_cheap_to_pickle(tmp_path: Path) -> None:
    given = {"path": [save(tmp_path / "a.png")] * 1000, "label": ["a", "b"] * 500}
    assert len(pickle.dumps(images(given, size=(512, 512)))) < 20_000
