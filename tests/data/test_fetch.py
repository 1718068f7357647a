"""Original data sets from wherever they can be had: a folder, Debian's package, a mirror."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import struct
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpcdist.data import describe, fetch, importers
from hpcdist.errors import DataError, OutputError, UnknownNameError

FILES = {
    "train-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, 5, 2, 2) + bytes(range(20)),
    "train-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, 5) + bytes(5),
    "t10k-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 2) + bytes(8),
    "t10k-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, 2) + bytes(2),
}
SHA = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


class Mirror(BaseHTTPRequestHandler):
    """Send FILES compressed, the rest of one where that is asked for; each connection ends after `most` bytes."""

    most: int | None = None
    broken: dict[str, bytes] = {}
    asked: list[str] = []

    def do_GET(self):
        name = Path(self.path).name
        if name.removesuffix(".gz") not in FILES or self.path.startswith("/gone/"):
            return self.send_error(404)
        data = self.broken.get(name, gzip.compress(FILES[name.removesuffix(".gz")], mtime=0))
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        self.asked.append(f"{name}:{start}")
        if start >= len(data):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:][: self.most])

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(monkeypatch):
    """A mirror of a small data set, the only place that has it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # looks for its end that often
    Mirror.most, Mirror.broken, Mirror.asked = None, {}, []
    address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr(
        fetch, "RELEASES", {"tiny": fetch.Release("Tiny", "mnist", SHA, (f"{address}gone/no/", address))}
    )
    yield Mirror
    server.shutdown()
    server.server_close()


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def given(folder: Path, end: str = "") -> Path:
    """A folder with the files, compressed or not."""
    folder.mkdir()
    for name, data in FILES.items():
        (folder / f"{name}{end}").write_bytes(gzip.compress(data) if end else data)
    return folder


def test_a_mirror_has_them_and_once_is_enough(mirror, tmp_path):
    seen = []
    origin = fetch.fetch("tiny", tmp_path / "a" / "b", show=lambda *args: seen.append(args))
    assert origin.startswith("http://127.0.0.1") and written(tmp_path / "a" / "b") == FILES
    assert {name for name, *_ in seen} == {f"{name}.gz" for name in FILES}
    assert all(done <= total for _, done, total in seen) and seen[-1][1] == seen[-1][2]
    asked = list(mirror.asked)
    assert fetch.fetch("tiny", tmp_path / "a" / "b").endswith("where they were already") and mirror.asked == asked
    (tmp_path / "a" / "b" / "t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    fetch.fetch("tiny", tmp_path / "a" / "b")
    assert written(tmp_path / "a" / "b") == FILES
    assert mirror.asked[len(asked) :] == ["t10k-labels-idx1-ubyte.gz:0"] * 1


def test_an_interrupted_download_goes_on(mirror, tmp_path):
    mirror.most = 10
    with pytest.raises(DataError, match=r"the connection ended after 10 of \d+ bytes of train-images-idx3-ubyte.gz"):
        fetch.fetch("tiny", tmp_path)
    mirror.most = None
    whole = gzip.compress(FILES["t10k-images-idx3-ubyte"], mtime=0)  # of which only the name is to be changed
    (tmp_path / "t10k-images-idx3-ubyte.gz.download").write_bytes(whole)
    fetch.fetch("tiny", tmp_path)
    assert {"train-images-idx3-ubyte.gz:10", f"t10k-images-idx3-ubyte.gz:{len(whole)}"} < set(mirror.asked)
    assert written(tmp_path) == FILES


def test_a_file_that_is_not_the_original_is_refused(mirror, tmp_path):
    mirror.broken = {"train-images-idx3-ubyte.gz": gzip.compress(b"another")}
    match = r"train-images-idx3-ubyte.gz is not the original: its sha256 is [0-9a-f]{64}, not"
    with pytest.raises(DataError, match=match):
        fetch.fetch("tiny", tmp_path)
    assert written(tmp_path) == {}, "nor is it kept"
    mirror.broken = {"train-images-idx3-ubyte.gz": b"no gzip"}
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz can't be read \(Not a gzipped file"):
        fetch.fetch("tiny", tmp_path)


def test_each_place_says_why_it_has_none(monkeypatch, tmp_path):
    mirrors = ("http://127.0.0.1:9/", "http://127.0.0.1:9/b/")
    release = fetch.Release("Tiny", "mnist", SHA, mirrors, "no-such-package-here", tmp_path / "installed")
    monkeypatch.setattr(fetch, "RELEASES", {"tiny": release})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError) as error:
        fetch.fetch("tiny", tmp_path / "out")
    for reason in (
        "Tiny's four files must come from one of these places; none has them: ",
        "Debian's package no-such-package-here, installed: there is no such folder; ",
        "Debian's package no-such-package-here: there is no apt-get; ",
        "http://127.0.0.1:9/: [Errno 111] Connection refused; http://127.0.0.1:9/b/: ",
        "name their folder by --from.",
    ):
        assert reason in str(error.value)


@pytest.mark.skipif(shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None, reason="needs Debian's tools")
def test_a_package_that_is_not_there(monkeypatch, tmp_path):
    settings = tmp_path / "apt.conf"  # without the lists of all packages, which take it seconds to read
    settings.write_text(f'Dir::State::Lists "{tmp_path}/lists"; Dir::Cache "{tmp_path}/cache";\n')
    for name in ("lists", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("APT_CONFIG", str(settings))
    release = fetch.Release("Tiny", "mnist", SHA, (), "no-such-package-here", tmp_path / "installed")
    monkeypatch.setattr(fetch, "RELEASES", {"tiny": release})
    with pytest.raises(DataError, match="Debian's package no-such-package-here: apt-get: E: .*no-such-package-here"):
        fetch.fetch("tiny", tmp_path / "out")


def test_from_a_folder(mirror, tmp_path):
    for end in ("", ".gz"):
        source = given(tmp_path / f"given{end}", end)
        assert fetch.fetch("tiny", tmp_path / f"out{end}", source=source) == str(source)
        assert written(tmp_path / f"out{end}") == FILES
    with pytest.raises(DataError, match="none: there is no such folder"):
        fetch.fetch("tiny", tmp_path / "there", source=tmp_path / "none")
    source = tmp_path / "given"
    (source / "t10k-images-idx3-ubyte").rename(source / "t10k-images.idx3-ubyte")  # as some archives have it
    fetch.fetch("tiny", tmp_path / "there", source=source)
    (source / "t10k-images.idx3-ubyte").unlink()
    match = "it has none of t10k-images-idx3-ubyte, t10k-images-idx3-ubyte.gz, t10k-images.idx3"
    with pytest.raises(DataError, match=match):
        fetch.fetch("tiny", tmp_path / "elsewhere", source=source)
    assert mirror.asked == []
    with pytest.raises(UnknownNameError, match="data set must be one of tiny; got 'tyni'"):
        fetch.fetch("tyni", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        fetch.fetch("tiny", tmp_path / "file")


def test_the_command_names_origin_folder_and_next_step(mirror, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from hpcdist.tools.cli import app

    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["data", "fetch", "tiny"]).output
    assert re.search(
        r"Tiny: http://127.0.0.1:\d+/\nfolder: data/tiny\nnext: hpcdist data import mnist data/tiny tiny.h5", shown
    )
    described = describe(importers.load("mnist")("data/tiny", "tiny.h5"))
    assert "5" in str(described)


@pytest.mark.extended
def test_fashion_mnist_from_debian(tmp_path):
    """60,000 and 10,000 images, 47 and 8 MB."""
    asked = ["apt-get", "--print-uris", "download", "dataset-fashion-mnist"]
    if shutil.which("apt-get") is None or not subprocess.run(asked, capture_output=True).stdout:
        pytest.skip("no Debian package can be reached")
    origin = fetch.fetch("fashion-mnist", tmp_path / "idx")
    assert origin.startswith("Debian's package dataset-fashion-mnist")
    path = importers.load("fashion-mnist")(tmp_path / "idx", tmp_path / "fashion.h5")
    described = str(describe(path))
    assert "60000" in described and "10000" in described and "Ankle boot" in described
