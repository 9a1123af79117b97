"""Peak memory of loading clips as their number grows: it must not.

python benchmarks/clip_memory.py                                # 1,000, 4,000 and 16,000 clips
python benchmarks/clip_memory.py --clips 1000 50000 --record

A list names the same few videos (moving shapes of 12 frames, H.264) again and again, each line a
clip of its own id. Each number of clips is loaded by a process of its own, as `extract` loads them,
8 frames of each. Beside the peak stands that of the process before its first clip, libraries
included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from common import Result, add_record_option, machine, peak_rss, record

FILES, FRAMES, SIDE = 16, 12, 64
LOAD = """
import sys
from vitsee_core.images import batches, open_source, select
import av, torch
source = open_source(sys.argv[1], clips=True)
selection = select(source, order="dataset")
assert len(selection) == int(sys.argv[2])
transform = {"input_size": (3, 32, 32), "interpolation": "bilinear", "crop_pct": 1.0,
             "crop_mode": "center", "mean": (0.5,) * 3, "std": (0.5,) * 3,
             "clip": {"frames": 8, "every": None, "time": "ordered"}}
stop = min(len(selection), int(sys.argv[3]))
ranges = [slice(i, min(i + 32, stop)) for i in range(0, stop, 32)]
for batch in batches(selection, transform, ranges, workers=0):
    assert batch.valid.all(), batch.errors
"""


def write_videos(folder: Path) -> list[str]:
    """The names of `FILES` small videos."""
    import av
    import numpy as np

    names = []
    for k in range(FILES):
        noise = np.random.default_rng(k).integers(0, 80, (SIDE, SIDE, 3), np.uint8)
        name = f"{k}.mp4"
        with av.open(str(folder / name), "w") as container:
            stream = container.add_stream("libx264", rate=10)
            stream.height = stream.width = SIDE
            stream.pix_fmt = "yuv420p"
            for frame in range(FRAMES):
                picture = noise.copy()
                picture[k : k + 16, 4 * frame : 4 * frame + 16] = 255
                container.mux(
                    stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
                )
            container.mux(stream.encode(None))
        names.append(name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clips", type=int, nargs="+", default=[1000, 4000, 16000])
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = write_videos(folder)
        for n in args.clips:
            lines = [f"{names[i % FILES]},clip{i}" for i in range(n)]
            (folder / "list.csv").write_text("\n".join(["path,id", *lines, ""]))
            command = [sys.executable, "-c", LOAD, str(folder / "list.csv"), str(n)]
            before, after = (peak_rss([*command, str(stop)]) / 1e6 for stop in (0, n))
            print(
                f"{n:7d} clips: peak RSS {after:7.1f} MB, {before:7.1f} before",
                flush=True,
            )
            rows.append(
                Result(f"{n:,} clips, against the list alone", after, before, None, "MB")
            )
    if args.record:
        record("clip-memory", "Peak memory of loading clips", rows)


if __name__ == "__main__":
    main()
