"""A tar stream from elsewhere: nothing of it is written but files of an export, within the folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from natslog.backup.tar_streams import TarWriter, extract
from natslog.errors import DamagedExport

FILE = f"{0:020d}.arrow"


def tar_of(*members: tuple[str, dict[str, object]]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name, changes in members:
            info = tarfile.TarInfo(name)
            info.size = 3
            for field, value in changes.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(b"abc") if info.isreg() else None)
    return sink.getvalue()


@pytest.mark.parametrize(
    "member",
    [
        ("../x.arrow", {}),
        ("/etc/passwd", {}),
        (f"/{FILE}", {}),
        (f"../{FILE}", {}),
        (f"streams/../{FILE}", {}),
        (f"streams/a/b/{FILE}", {}),
        (f"streams/.hidden/{FILE}", {}),
        ("letter.txt", {}),
        (FILE, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        (FILE, {"type": tarfile.LNKTYPE, "linkname": "manifest.json"}),
        (FILE, {"type": tarfile.GNUTYPE_SPARSE}),
        (FILE, {"type": tarfile.FIFOTYPE}),
        (FILE, {"type": tarfile.CHRTYPE}),
        ("streams", {"type": tarfile.DIRTYPE}),
    ],
)
def test_members_that_are_no_file_of_an_export_are_refused(
    member: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    folder = tmp_path / "in" / "side"
    folder.mkdir(parents=True)
    with pytest.raises(DamagedExport, match="no file of an export"):
        extract(io.BytesIO(tar_of(member)), folder)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()] == []


def test_streams_that_are_cut_short_or_foreign_are_refused(tmp_path: Path) -> None:
    good = tar_of((FILE, {}), ("manifest.json", {}))
    for number, data in enumerate((b"", b"no tar", b"\0" * 100, good[:700], good[:514], good + b"", good[:1024] * 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            extract(io.BytesIO(data), folder)
        except DamagedExport:
            continue
        assert data == good, f"case {number}"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    source, target, sink = tmp_path / "a", tmp_path / "b", io.BytesIO()
    (source / "streams" / "orders").mkdir(parents=True)
    target.mkdir()
    for name in (f"streams/orders/{FILE}", "streams/orders/manifest.json", "cluster.json"):
        (source / name).write_bytes(name.encode())
    tar = TarWriter(sink, source)
    for path in sorted(source.rglob("*.*")):
        tar.add(path)
    tar.close()
    extract(io.BytesIO(sink.getvalue()), target)
    found = {path.relative_to(target): path.read_bytes() for path in target.rglob("*.*")}
    assert found == {path.relative_to(source): path.read_bytes() for path in source.rglob("*.*")}
