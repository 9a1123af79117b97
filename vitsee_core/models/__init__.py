"""Models: a name, a checkpoint or a torch module -> a model, its sites, hooks that capture them.

Five entrances, in the order in which a model goes through them:

1. `load.load_model`          a name is a model: `sources/` make it, `weights/` read checkpoints,
                              `lasting_changes` take skips out; what comes out is a `LoadedModel`
2. `survey.survey`            a few forward passes: blocks, grids, the geometry of its tokens;
                              `tokens/` say how packed patches and clips go in, and in which order
                              their tokens lie
3. `site_tables.site_table`   what can be captured, and where: built in `sites/`, proven by `proofs`
4. `capture.Capture`          hooks pass tensors to observers, attention by `attention_watch`;
                              `selfcheck` compares on the first images, `interventions/` change
                              what the hooks see
5. `provenance.model_of`      the same model again, from what a store says of it; `same_origin` for
                              stores that grow

`hook_points` has the words of all of these: a place in the forward pass (`HookPoint`), how its
tensor is read as tokens (`View`), and `ModelError`. `without_weights` has sites and sizes of models
that are not loaded.
"""
