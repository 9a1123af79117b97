"""How fast are slabs written and read, against numpy's tofile and fromfile?

Claim: on [256, 197, 768] float16 slabs in row chunks with crc32c, without fsync and from the page
cache, writing reaches 0.3 of tofile and reading 0.4 of fromfile. The cost of fsync is shown apart:
it is the disk's. Zarr's own writers and readers of the same bytes stand beside ours. All sides
alternate in one process; medians and medians of the rounds' ratios are printed.

    python benchmarks/store_io.py [--rounds 15] [--folder DIR] [--codec none|zstd|lz4]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from common import interleaved, machine, paired_ratio
from numpy.typing import NDArray
from synthetic import block_sites
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from vitsee_stores import Samples, StorePlan, StoreWriter, TokenLayout, open_store
from vitsee_stores.disk import n_cores, sync
from vitsee_stores.layout import CODECS, arrays
from vitsee_stores.manifest import new_manifest

IMAGES, GRID, DIM = 256, (14, 14), 768
SITE = "blocks.0.out"
ACTS = [f"acts/{SITE}/prefix", f"acts/{SITE}/grid"]
FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"
MB = 1e6

Array = NDArray[Any]
Side = Callable[[], float]


def main() -> None:
    """Prints the machine and a row a side."""
    parser = argparse.ArgumentParser(description="Slabs against numpy's files.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: /tmp"
    )
    parser.add_argument("--codec", choices=CODECS, default="none")
    args = parser.parse_args()
    print(f"{machine()}, zarr {zarr.__version__}, numpy {np.__version__}")
    print(f"load {os.getloadavg()[0]:.1f}, {n_cores()} threads, codec {args.codec}")
    bench = Bench(Path(tempfile.mkdtemp(prefix="store-io-", dir=args.folder)), args.codec)
    try:
        size = sum(bench.slab[path].nbytes for path in ACTS) / MB
        print(f"slab [{IMAGES}, {GRID[0] * GRID[1] + 1}, {DIM}] float16, {size:.0f} MB")
        show("write, no fsync", bench.writes(durable=False), args.rounds, size)
        show(
            "write and fsync", bench.writes(durable=True), max(3, args.rounds // 3), size
        )
        show("read", bench.reads(), args.rounds, size)
        token = bench.one_token()
        seconds = statistics.median(interleaved({"token": token}, args.rounds)["token"])
        print(f"one token of all images: {1e3 * seconds:.1f} ms")
    finally:
        shutil.rmtree(bench.folder)


def show(title: str, sides: dict[str, Side], rounds: int, size: float) -> None:
    """A row a side; ratios to the first. CPU time is of all threads, and what a round makes beside
    the slab counts in it."""
    cpu: dict[str, list[float]] = {name: [] for name in sides}

    def counted(name: str) -> float:
        began = time.process_time()
        seconds = sides[name]()
        cpu[name].append(time.process_time() - began)
        return seconds

    seconds = interleaved(
        {name: partial(counted, name) for name in sides}, rounds, warmup=2
    )
    first = next(iter(sides))
    print(
        f"\n{title:24} {'MB/s':>7} {'ratio':>6} {'CPU ms':>7}   medians of {rounds} rounds"
    )
    for name, spent in seconds.items():
        rate, used = (
            size / statistics.median(spent),
            1e3 * statistics.median(cpu[name][2:]),
        )
        print(
            f"{name:24} {rate:7.0f} {paired_ratio(seconds[first], spent):6.2f} {used:7.1f}"
        )


class Bench:
    """One slab, and folders to write it into."""

    def __init__(self, folder: Path, codec: str):
        self.folder = folder
        layout = TokenLayout(("cls",), GRID, stride_px=(16.0, 16.0))
        self.plan = StorePlan(IMAGES, IMAGES, codec, block_sites(1, DIM, layout))
        numbers = np.arange(IMAGES)
        self.samples = Samples(numbers, [str(i) for i in numbers], numbers, [""] * IMAGES)
        rng = np.random.default_rng(0)
        self.slab: dict[str, Array] = {}
        for path, spec in arrays(self.plan).items():
            if spec.per in ("image", "slab"):
                values = (
                    np.ones(spec.shape)
                    if spec.dtype[0] != "f"
                    else rng.normal(size=spec.shape)
                )
                self.slab[path] = values.astype(spec.dtype)
        self.slab["n_valid"] = np.array(IMAGES)

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """An empty folder, removed afterwards: replaced files would make ext4 write at once."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield place
        finally:
            shutil.rmtree(place)

    def writes(self, durable: bool) -> dict[str, Side]:
        """Sides that write the slab; each returns its own seconds."""
        tokens = np.concatenate([self.slab[ACTS[0]], self._flat_grid()], 1)

        def tofile() -> float:
            with self.fresh() as place:
                began = time.perf_counter()
                tokens.tofile(place / "slab")
                if durable:
                    sync(place / "slab")
                return time.perf_counter() - began

        def ours() -> float:
            with self.fresh() as place:
                writer = self.writer(place / "a.zarr", durable)
                began = time.perf_counter()
                writer.write_slab(0, self.slab, {})
                return time.perf_counter() - began

        def zarrs() -> float:
            with self.fresh() as place:
                made = self.zarr_arrays(place / "z.zarr")
                began = time.perf_counter()
                for path, array in made.items():
                    array[...] = self.slab[path]
                return time.perf_counter() - began

        sides: dict[str, Side] = {"numpy tofile": tofile, "vitsee": ours}
        if not durable:
            sides |= with_pipelines(zarrs)
        return sides

    def reads(self) -> dict[str, Side]:
        """Sides that read all tokens of the slab into new memory."""
        np.concatenate([self.slab[ACTS[0]], self._flat_grid()], 1).tofile(
            self.folder / "slab"
        )
        self.writer(self.folder / "a.zarr").write_slab(0, self.slab, {})
        StoreWriter.create_or_join(
            self.folder / "a.zarr", self.manifest, self.samples
        ).finish()
        store = open_store(self.folder / "a.zarr")
        group = zarr.open_group(self.folder / "a.zarr", mode="r")

        def timed(read: Callable[[], Any]) -> Side:
            def side() -> float:
                began = time.perf_counter()
                read()
                return time.perf_counter() - began

            return side

        return {
            "numpy fromfile": timed(
                lambda: np.fromfile(self.folder / "slab", np.float16)
            ),
            "vitsee, all": timed(lambda: store.acts(SITE)[:]),
            "vitsee, patches": timed(lambda: store.acts(SITE, "patches")[:]),
            **with_pipelines(timed(lambda: [group[path][...] for path in ACTS])),  # type: ignore[index]
        }

    def one_token(self) -> Callable[[], None]:
        """Reads one grid cell of all images."""
        store = open_store(self.folder / "a.zarr")

        def read() -> None:
            store.acts(SITE, (7, 7))[:]

        return read

    def writer(self, path: Path, durable: bool = True) -> StoreWriter:
        """The writer of a new store."""
        self.manifest = new_manifest({}, self.plan, self.samples)
        return StoreWriter.create_or_join(
            path, self.manifest, self.samples, durable=durable
        )

    def zarr_arrays(self, path: Path) -> dict[str, Any]:
        """The same arrays, made by zarr."""
        group = zarr.create_group(path)
        made = {}
        for name in self.slab:
            if name == "n_valid":
                continue
            spec = arrays(self.plan)[name]
            item = np.dtype(spec.dtype).itemsize
            compressor: dict[str, list[Any]] = {
                "none": [],
                "zstd": [ZstdCodec(level=1)],
                "lz4": [
                    BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=item)
                ],
            }
            made[name] = group.create_array(
                name,
                shape=spec.shape,
                chunks=spec.chunks,
                dtype=spec.dtype,
                fill_value=spec.fill,
                compressors=[*compressor[spec.codec], Crc32cCodec()],
                chunk_key_encoding={"name": "default", "separator": "."},
                config={"write_empty_chunks": True},
            )
        return made

    def _flat_grid(self) -> Array:
        return self.slab[ACTS[1]].reshape(IMAGES, -1, DIM)


def with_pipelines(side: Side) -> dict[str, Side]:
    """Zarr's default pipeline, and the fused one where this zarr has it."""
    from zarr.core import codec_pipeline

    def fused() -> float:
        with zarr.config.set({"codec_pipeline.path": FUSED}):
            return side()

    has = hasattr(codec_pipeline, FUSED.rpartition(".")[2])
    return {"zarr": side, **({"zarr, fused pipeline": fused} if has else {})}


if __name__ == "__main__":
    main()
