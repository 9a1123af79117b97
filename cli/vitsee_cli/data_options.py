"""Options that say which images: those of `extract`, and where a store's images are now."""

from __future__ import annotations

import click

from vitsee_cli.declared import a_file, a_number
from vitsee_cli.options import together
from vitsee_cli.values import SEED, WholeNumber, parse_words
from vitsee_core.images.selection import ORDERS

# Which images in which order, as the fields of a DataOptions.
data_options = together(
    click.option(
        "--data",
        required=True,
        metavar="DATA",
        help="Folder of images, .csv, .tsv or .txt list, .npz, .zip, .tar or .parquet files "
        "('shards/in1k-{0000..0063}.tar', 'data/*.parquet'), folders and files at s3://, gs://, "
        "az://, https:// or hf://datasets/OWNER/NAME, torch/NAME[:FOLDER] (torchvision's, in "
        "FOLDER), hfds/NAME[:CACHE] (Hugging Face's, cached in CACHE), demo:train or demo:test.",
    ),
    click.option(
        "--label-key",
        metavar="KEY",
        type=parse_words,
        help="Of .tar files: where an image's label is, cls or txt for that file beside it, else a "
        "field of its .json.  [default: .cls, else label, cls or class of .json, else .txt if a "
        "number]",
    ),
    click.option(
        "--image-column",
        metavar="COLUMN",
        type=parse_words,
        help="Of .parquet files: the column of images.  [default: the only one]",
    ),
    click.option(
        "--label-column",
        metavar="COLUMN",
        type=parse_words,
        help="Of .parquet files: the column of labels, numbers or names.  [default: label, labels, "
        "fine_label, cls or class]",
    ),
    click.option(
        "--split",
        metavar="SPLIT",
        help="Part of the data: train, 'train[:45000]', 'test[10%:20%]', train+test.  "
        "[default: all]",
    ),
    a_number(
        "--images",
        help="Take N images: the first of the order.  [default: all]",
    ),
    click.option(
        "--per-class",
        metavar="K",
        type=WholeNumber(min=1),
        help="Take K images of every class.  [default: all]",
    ),
    a_file(
        "--only",
        help="Choose from the images that FILE names, one a line: ids with or without ending, "
        "folders of them, or names of files.  [default: all]",
    ),
    click.option(
        "--seed",
        metavar="SEED",
        type=SEED,
        help="Seed of the order.  [default: 0]",
    ),
    click.option(
        "--order",
        type=click.Choice(ORDERS),
        help="Order of the images in the store.  [default: shuffled]",
    ),
    a_number(
        "--short-side",
        help="No crop: resize each image so that its short side has N pixels, and its long side, "
        "in proportion, a multiple of M.  [default: bring every image to the model's input]",
    ),
    click.option(
        "--multiple",
        metavar="M",
        type=WholeNumber(min=1),
        help="Of --short-side.  [default: the model's patch]",
    ),
    click.option(
        "--tiles",
        is_flag=True,
        help="Of --short-side: run the model on tiles of its own input size and put their tokens "
        "into one grid per image; images may differ in size.",
    ),
)

recompute_data_option = click.option(
    "--data",
    metavar="DATA",
    type=parse_words,
    help="Where the images are now, for what has to be recomputed.  [default: where extract read "
    "them]",
)
