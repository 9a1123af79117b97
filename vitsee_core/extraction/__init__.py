"""A model over images, into a store. Five files to read first, in this order:

    options.py   what is asked for: the model, the data, what to keep, how to run
    prepare.py   model, images, checks and manifest, of a new store or an unfinished one
    run.py       one call of `extract`: begin, create or join, fill what this process owns
    loop.py      slab by slab: forward passes in one thread, writing in another
    slab.py      what a capture fills: tokens, pooled vectors, attention, branches, sums

and the rest, around them:

    what a store will hold    plan, identity (what joining compares), growth (of a complete store)
    images of other shapes    image_layout (which of them), tiles, native, by_frame
    the numbers of a slab     buffers, transfer (to and from a device), slab_grams, erf
    several processes         sharding (who makes which slab), by_workers (--dask)
    around a run              keywords (`vitsee.extract`), ahead (--dry-run, --plan), outcome
"""
