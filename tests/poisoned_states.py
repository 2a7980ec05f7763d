"""Complete checkpoints with values that are not finite, as an older version could write them."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

from meshrl.train.checkpoint_files import commit, make_temporary_folder, read_manifest, write_file


def poison(source: Path, final: Path, file: str, prefix: str) -> str:
    """Copy the state `source` to `final`; the last value of the first non-empty float32 tensor of `file` whose name
    starts with `prefix` becomes NaN. Returns the tensor's name."""
    manifest = read_manifest(source)
    temporary = make_temporary_folder(final)
    poisoned, files = "", {}
    for name in manifest.files:
        content = bytearray((source / name).read_bytes())
        if name == file:
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            for key, entry in header.items():
                if key.startswith(prefix) and entry["dtype"] == "F32" and len(entry["shape"]) > 0:
                    first, end = entry["data_offsets"]
                    if end > first:
                        content[8 + length + end - 4 : 8 + length + end] = struct.pack("<f", float("nan"))
                        poisoned = key.partition("@")[0]
                        break
        files[name] = write_file(temporary / name, [memoryview(content)])
    assert poisoned, f"{file} has no tensor {prefix}*"
    commit(final, dataclasses.replace(manifest, files=files))
    return poisoned
