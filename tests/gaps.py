"""Removes messages from the files of a stopped broker, as the rewriting of segments does."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from natslog.arrow import ipc
from natslog.log.recovery import scan_segment
from natslog.log.segment import check_file_header, read_batch


def remove_offsets(active: Path, removed: set[int]) -> None:
    """Writes an unsealed segment again without these offsets."""
    data, base_offset = active.read_bytes(), int(active.stem)
    header_bytes = check_file_header(data[: ipc.MAX_HEADER_BYTES], active, None, base_offset)
    index = scan_segment(active, position=header_bytes, base_offset=base_offset).index
    pieces = [data[:header_bytes]]
    fd = os.open(active, os.O_RDONLY)
    for at in range(len(index)):
        entry = index[at]
        flags = np.array([offset in removed for offset in range(entry.base_offset, entry.end_offset)], bool)
        pieces.append(bytes(ipc.without_rows(read_batch(fd, entry, active), flags)))
    os.close(fd)
    active.write_bytes(b"".join(pieces))
