"""Options of the commands that compare representations: the estimator, and its Gram matrices."""

from __future__ import annotations

import functools
from typing import Any

import click

from vitsee_cli.options import (
    FEATURE_TOKENS,
    Decorator,
    apply,
    device_option,
    memory_option,
    side_option,
    sites_option,
    tokens_option,
)
from vitsee_cli.values import parse_folder
from vitsee_core.grams.arithmetic import PRECISIONS
from vitsee_core.similarity.batches import BATCH, EXAMPLES, REPEATS
from vitsee_core.similarity.estimate import MOST_EXACT
from vitsee_core.similarity.pairing import PAIR_BY
from vitsee_core.similarity.pairs import PAIRS
from vitsee_core.similarity.presets import KINDS


def estimator_options(*presets: str) -> Decorator:
    """--estimator and the sizes of minibatches, and --preset with these names."""
    sizes = (
        ("--batch", "images in a minibatch", 4, BATCH),
        ("--examples", "images in a repeat, drawn without replacement", 4, EXAMPLES),
        ("--repeats", "how often they are drawn", 1, REPEATS),
    )
    return lambda command: apply(
        command,
        (
            click.option(
                "--estimator",
                type=click.Choice(KINDS),
                show_default=f"exact for up to {MOST_EXACT} images, else minibatch",
                help="exact: unbiased HSIC over all images; minibatch: its mean over batches; "
                "biased: the original CKA, inflated for few images.",
            ),
            *(
                click.option(
                    name,
                    metavar="N",
                    type=click.IntRange(min=least),
                    show_default=str(default),
                    help=f"Of the minibatch estimator: {text}.",
                )
                for name, text, least, default in sizes
            ),
            click.option(
                "--preset",
                type=click.Choice(presets),
                help="The estimator of a paper or its code; options given beside it win.  "
                "[default: none]",
            ),
        ),
    )


def pair_options(default_tokens: str | None = "all", show_default: str | None = None) -> Decorator:
    """Which sites of which stores meet, and by which tokens: `sites`, `sites_a`, `sites_b`,
    `tokens` (by default one word, or what `show_default` describes), `pairs`, `pair_by`."""
    return lambda command: apply(
        command,
        (
            sites_option(show_default="blocks"),
            side_option("a", "the rows"),
            side_option("b", "the columns"),
            tokens_option(default_tokens, FEATURE_TOKENS, show_default=show_default),
            click.option(
                "--pairs",
                type=click.Choice(PAIRS),
                default="all",
                show_default=True,
                help="same-depth: the first store's sites with each other store's, by name or else "
                "one by one; branch: skip connections against the branches parallel to them, in "
                "one store.",
            ),
            click.option(
                "--pair-by",
                type=click.Choice(PAIR_BY),
                default="image",
                show_default=True,
                help="image: the stores hold the same images in the same order; id: rows of the "
                "same id, whatever their bytes and order (clean against corrupted images of the "
                "same names).",
            ),
        ),
    )


def gram_options(command: Any) -> Any:
    """Where Gram matrices are kept and made: `cache`, `no_cache`, `device`, `memory`."""

    @functools.wraps(command)
    def checked(*args: Any, cache: Any, no_cache: bool, **kwargs: Any) -> Any:
        if cache is not None and no_cache:
            raise click.UsageError("--cache and --no-cache exclude each other")
        return command(*args, cache=cache, no_cache=no_cache, **kwargs)

    return apply(checked, _GRAM_OPTIONS)


# Of products of features; that of `options` is of a model's forward pass.
precision_option = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="Of the products that Gram matrices are made of. fp32: CKA within 1e-7 of double "
    "precision. bf16: up to twice as fast where the processor multiplies bfloat16; moves CKA by "
    "4e-6 at 512 images, less at more.",
)
_GRAM_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--cache",
        metavar="DIR",
        type=parse_folder,
        help="Keep Gram matrices in DIR.  [default: STORE.grams beside each store]",
    ),
    click.option(
        "--no-cache",
        is_flag=True,
        help="Keep no Gram matrices.  [default: keep them for later comparisons]",
    ),
    device_option,
    memory_option,
)
