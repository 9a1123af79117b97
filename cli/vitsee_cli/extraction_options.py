"""Options of `extract` itself: the contents of a store, and how the process works."""

from __future__ import annotations

import click

from vitsee_cli.declared import a_number, complete_from
from vitsee_cli.options import SITE_WORDS, dask_option, device_option, together
from vitsee_cli.values import WholeNumber, parse_place
from vitsee_core.extraction.options import (
    ATTENTION_LEVELS,
    DEFAULT_SITES,
    DEFAULT_SLAB,
    PRECISIONS,
    RunOptions,
)
from vitsee_core.images.loading import ON_ERROR
from vitsee_stores.layout import CODECS
from vitsee_stores.selectors import GROUPS

# Words that the shell completes for --tokens.
TOKEN_WORDS = ["all", "pooled"]
for group in GROUPS:
    TOKEN_WORDS += [f"{group}=all", f"{group}=pooled"]

store_output_option = click.option(
    "-o",
    "--output",
    metavar="STORE",
    type=parse_place,
    required=True,
    help="The store to fill.",
)

ablate_skip_option = click.option(
    "--ablate-skip",
    metavar="BLOCK[.attn|.mlp]",
    multiple=True,
    help="Run the model without this skip connection: z + f(z) becomes f(z). A block "
    "alone: all of its own. Repeatable.  [default: none]",
)


# Changes of the model while it runs, which identify the store.
intervention_options = together(
    [
        click.option(
            "--replace",
            metavar="TOKENS@SITES=VALUES",
            multiple=True,
            help="Replace tokens (cls, registers, prefix, patches, all, reg0, "
            "outliers:N, random:N) at SITES by zero, or by mean:STORE, noise:STORE, "
            "shuffle:STORE of a plain extraction. Repeatable.  [default: none]",
        ),
        click.option(
            "--ablate-heads",
            metavar="BLOCK:HEAD,HEAD[=VALUES]",
            multiple=True,
            help="Replace the outputs of heads, by zero or as --replace. Repeatable.  "
            "[default: none]",
        ),
        click.option(
            "--block-attention",
            metavar="QUERIES<-KEYS@BLOCKS",
            multiple=True,
            help="Keep queries from attending to keys: 'cls<-patches@blocks.6..11'; or "
            "own, distance>K (cells) in their place. Repeatable.  [default: none]",
        ),
        click.option(
            "--registers",
            metavar="N:NEURONS@SITE=VALUES",
            multiple=True,
            help="Add N tokens, and move to them the NEURONS of MLPs up to SITE that are "
            "most active at its outlier patches, by outliers:STORE of a plain extraction "
            "with hidden layers; or, as a control, as many others, by random:STORE.  "
            "[default: none]",
        ),
    ],
)

precision_option = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Arithmetic of the forward pass.  [default: fp32]",
)

# The fields of a KeepOptions. None is the default of a new store, or the value of a joined one.
keep_options = together(
    [
        click.option(
            "--sites",
            metavar="GLOB",
            multiple=True,
            shell_complete=complete_from(SITE_WORDS),
            help=f"Sites by name, glob or group ({', '.join(GROUPS)}), or by place "
            "(first, last, stage:I, depth:F); !NAME leaves out; see `vitsee sites "
            f"MODEL`. Repeatable, or a comma list.  [default: {' '.join(DEFAULT_SITES)}]",
        ),
        click.option(
            "--tokens",
            metavar="[GROUP=]all|pooled",
            multiple=True,
            shell_complete=complete_from(TOKEN_WORDS),
            help="Keep every token, or only pooled vectors; norms=pooled for some sites. "
            "Repeatable.  [default: all]",
        ),
        click.option(
            "--attention",
            type=click.Choice(ATTENTION_LEVELS),
            help="Attention to keep: summaries per head, also CLS and received rows per "
            "image, also full maps; each level includes those before it.  [default: "
            "summary]",
        ),
        click.option(
            "--residual/--no-residual",
            default=None,
            help="Keep the dot products of skip and branch, per token and sublayer.  "
            "[default: residual]",
        ),
        click.option(
            "--inputs/--no-inputs",
            default=None,
            help="Keep the pixels as the model sees them.  [default: no-inputs]",
        ),
        click.option(
            "--grams/--no-grams",
            default=None,
            help="Keep each site's Gram matrix (all tokens) within every slab: minibatch "
            "CKA of whole models without their activations.  [default: no-grams]",
        ),
        a_number(
            "--erf",
            help="Keep effective receptive fields of the sites with a grid, over the "
            "first N images (256 gives smooth ones): one backward pass per site and "
            "batch.  [default: none]",
        ),
        click.option(
            "--head-weights/--no-head-weights",
            default=None,
            help="Keep the classifier and the norm before it, whatever their size.  "
            "[default: up to 16 MB]",
        ),
        click.option(
            "--dtype",
            metavar="[SITE=]float16|float32",
            multiple=True,
            help="Type of the activations; SITE=float32 for some. Repeatable.  [default: "
            "float16]",
        ),
        click.option(
            "--codec",
            type=click.Choice(CODECS),
            help="Compression of the chunks.  [default: none]",
        ),
        a_number(
            "--slab",
            help="Images per slab, the unit of work and of commit.  [default: "
            f"{DEFAULT_SLAB}, halved until two fit a quarter of the memory]",
        ),
    ],
)

# Nothing here changes a number: the fields of a RunOptions less `output`, `shard`, `plan`, `dask`.
run_options = together(
    [
        click.option(
            "--dry-run",
            is_flag=True,
            help="Print what would be stored, as CSV: the sum and each folder, with -v "
            "each array. Nothing is written.",
        ),
        click.option(
            "--plan",
            type=click.Choice(["slurm"]),
            help="Print a script that submits this as an array job on SLURM, and a job "
            "behind it that validates the store; nothing is computed or written.  "
            "[default: none]",
        ),
        click.option(
            "--force", is_flag=True, help="Start over: delete the store at -o first."
        ),
        a_number(
            "--batch-size",
            help="Images per forward pass.  [default: 32, on CUDA 128; with --grams a "
            "whole slab where that suits the memory]",
        ),
        device_option,
        click.option(
            "--workers",
            metavar="N",
            type=WholeNumber(min=0),
            help="Loading processes; 0 loads in a thread.  [default: 0 on the CPU, else "
            "up to 8]",
        ),
        click.option(
            "--shard",
            metavar="I/N|slurm|claims",
            help="Do only every N-th slab, from the I-th (from 0) on; slurm reads the "
            "job's variables; claims: any number of processes that come and go, each of "
            "which claims a few slabs at a time.  [default: all]",
        ),
        dask_option("slabs"),
        click.option(
            "--on-error",
            type=click.Choice(ON_ERROR),
            default=RunOptions.on_error,
            show_default=True,
            help="An unreadable image: a NaN row with valid = 0, or stop.",
        ),
    ],
)
