"""vitsee encode: a store of codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitsee_cli import console, options
from vitsee_cli.declared import Listed, a_file
from vitsee_cli.extraction_options import store_output_option
from vitsee_cli.sections import STORES
from vitsee_cli.values import FiniteRange, StorePath, WholeNumber, parse_path, parse_store
from vitsee_core.runtime.execution import Execution
from vitsee_core.tables.files import TABLE_ENDINGS, check_new_files
from vitsee_core.tables.formats import ending_of
from vitsee_stores.url import Place

QUESTION = STORES


@click.command()
@click.argument("store", metavar="[NAME=]STORE", type=parse_store)
@a_file(
    "--dictionary",
    "files",
    multiple=True,
    required=True,
    help="The dictionary, as saev, SAELens, overcomplete or vitsee concepts --save write "
    "it; one, or one for each site, in their order. Repeatable.",
)
@store_output_option
@click.option(
    "--sites",
    metavar="GLOB",
    cls=Listed,
    help="Sites to encode. Repeatable, or a comma list.  [default: the one that the "
    "dictionary was fitted on, if its file says it]",
)
@click.option(
    "--activation",
    "kind",
    type=click.Choice(("linear", "relu", "topk", "batchtopk", "jumprelu")),
    help="How the encoder's numbers become codes.  [default: what the file says]",
)
@click.option(
    "--k",
    metavar="K",
    type=WholeNumber(min=1),
    help="Directions that topk keeps of a token.  [default: what the file says]",
)
@click.option(
    "--threshold",
    metavar="X",
    type=FiniteRange(),
    help="Of batchtopk and jumprelu.  [default: the file's]",
)
@click.option(
    "--centre/--no-centre",
    default=None,
    help="Subtract the decoder's bias from tokens first.  [default: as the trainer does]",
)
@click.option(
    "--clamp/--no-clamp",
    default=None,
    help="Take negative numbers of tokens as 0 first.  [default: as the file says, else "
    "no-clamp]",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float16")),
    default="float32",
    show_default=True,
    help="Of the codes of tokens; pooled ones are float32.",
)
@click.option(
    "--table",
    metavar="TABLE",
    type=parse_path,
    help="Also write the reconstruction's metrics.  [default: no table]",
)
@options.force_option
@options.device_option
@options.memory_option
def command(
    store: StorePath,
    files: tuple[Path, ...],
    output: Place,
    sites: tuple[str, ...],
    dtype: str,
    table: Path | None,
    force: bool,
    device: str,
    memory: int | None,
    **overrides: Any,
) -> None:
    """Encode tokens by a dictionary, as a store of codes.

    A sparse autoencoder's (topk, batchtopk, jumprelu, relu), a projection, or the concepts of
    vitsee concepts: each token of a site becomes its code, in a store of the same images and
    places, which probe, knn, retrieve, cluster, pca, cosine-map and explore read as any other.
    Prints per site r2 (1 minus the fraction of variance unexplained), l0 (codes of a token that
    are not 0) and never_active, the share of directions without any. Repeat the command to resume.
    Experimental.

    \b
      $ vitsee encode b16.zarr --dictionary sae.pt --sites blocks.8.out -o codes.zarr
      $ vitsee encode b16.zarr --dictionary sae_weights.safetensors --sites blocks.8.out -o c.zarr
      $ vitsee encode b16.zarr --dictionary topk.safetensors --k 32 --sites last -o codes.zarr
      $ vitsee encode vit.zarr --dictionary concepts.safetensors -o codes.zarr --table r2.csv
    """
    from vitsee_core.sae.dictionary_files import Overrides, for_sites
    from vitsee_core.sae.encoding import encode_store

    # Encoding may take hours: an output that cannot be written is refused before it.
    if table is not None:
        ending_of(table, TABLE_ENDINGS, "the table")
        check_new_files([table], force=force)
    (opened,) = options.open_stores((store,))
    # Site -> its dictionary, and the file that has it.
    dictionaries = {}
    file_names = {}
    for site, (dictionary, path) in for_sites(
        opened, files, sites, Overrides(**overrides)
    ).items():
        dictionaries[site] = dictionary
        file_names[site] = path.name
    code_store, metrics = encode_store(
        opened,
        dictionaries,
        output,
        names=file_names,
        dtype=dtype,
        force=force,
        command=" ".join(console.command_line()),
        execution=Execution(
            device=device, memory=memory, progress=console.Reporter("encode")
        ),
    )
    if table is not None:
        metrics.write(table, force=force)
    console.out(f"{output}: {code_store.n_images} images")
    for rows in metrics.frame.partition_by("site", maintain_order=True):
        values = rows.select("metric", "value").rows()
        texts = [f"{metric} {value:.4g}" for metric, value in values]
        console.out(f"{rows['site'][0]}: {', '.join(texts)}")
