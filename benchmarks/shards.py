"""Time and memory of the index of many tar files, read and then found again; and of tarfile.

    python benchmarks/shards.py --folder DIR        # 1,000 tar files, a million images, 2 GB

The tar files are made in DIR where they are not there yet, and stay: each image is a payload of
some bytes with its label beside it, as headers are all that an index reads. Every side runs in a
process of its own. What numpy and the readers of images take without data is printed first.
Seconds are of the processor, which what else runs on the machine changes less than the clock's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from common import Result, add_record_option, machine, record, usage_of

IMPORTS = "from vitsee_core.images import open_source"
OPEN = f"import sys; {IMPORTS}; s = open_source(sys.argv[1]); assert len(s) == int(sys.argv[2])"
TARFILE = (
    "import glob, sys, tarfile\n"
    "for path in sorted(glob.glob(sys.argv[1])):\n"
    "    with tarfile.open(path, 'r:') as tar:\n"
    "        found = [(m.name, m.offset_data, m.size) for m in tar]\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the tar files: 2 GB"
    )
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--images", type=int, default=1000, help="in each")
    parser.add_argument("--bytes", type=int, default=300, help="of each")
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    n = args.shards * args.images
    data = str(make(args.folder, args.shards, args.images, args.bytes) / "*.tar")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        command = [sys.executable, "-c", OPEN, data, str(n)]
        bare = usage_of([sys.executable, "-c", IMPORTS])
        anew, again = usage_of(command), usage_of(command)
        kept = sum(
            path.stat().st_size for path in Path(cache).rglob("*") if path.is_file()
        )
    other = usage_of([sys.executable, "-c", TARFILE, data])
    sides = {"imports": bare, "read": anew, "found again": again, "tarfile": other}
    for name, used in sides.items():
        seconds = f"{used.cpu:7.1f} s of the processor, {used.seconds:7.1f} s"
        print(f"{name:12} {seconds}, peak {used.rss / 1e6:6.0f} MB")
    print(
        f"{n} images in {args.shards} tar files; the kept index has {kept / 1e6:.0f} MB"
    )
    if args.record:
        ratio = other.cpu / anew.cpu
        more, most = (anew.rss - bare.rss) / 1e6, (again.rss - bare.rss) / 1e6
        rows = [
            Result("the index of all, against tarfile", anew.cpu, other.cpu, ratio, "s"),
            Result("the same, found again", again.cpu, None, None, "s"),
            Result("its memory beyond the imports", more, None, None, "MB"),
            Result("found again, beyond the imports", most, None, None, "MB"),
            Result("on disk", kept / 1e6, None, None, "MB"),
        ]
        record("shards", f"Images in {args.shards:,} tar files, {n:,} in all", rows)


def make(folder: Path, shards: int, images: int, size: int) -> Path:
    """A folder of tar files."""
    place = folder / f"{shards}x{images}x{size}"
    place.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        path = place / f"s-{shard:05d}.tar"
        if path.exists():
            continue
        file = BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for image in range(images):
                key = f"{shard:05d}{image:06d}"
                for ending, data in (
                    ("cls", b"%d" % (image % 1000)),
                    ("jpg", bytes(size)),
                ):
                    about = tarfile.TarInfo(f"{key}.{ending}")
                    about.size = len(data)
                    tar.addfile(about, BytesIO(data))
        path.write_bytes(file.getvalue())
    return place


if __name__ == "__main__":
    main()
