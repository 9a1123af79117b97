"""Multiply matrices on the CPU and on GPUs, find nearest neighbours, solve ridge and logistic
regressions.

Nothing here knows a store or an analysis.

Gram matrices (`similarity/`, `extraction/slab_grams`) go through the protocol `MatmulBackend`:

    choose_device(--device, work)         auto: the CPU for little work, without importing torch
        |
    matmul_backend(device, precision)
        |-- cpu              Cpu           numpy: float32 or float64, syrk for x x^T;
        |                                  torch for other products where it is imported
        |-- cuda, fp32       Cuda          torch in full float32 (no TF32), half of x x^T;
        |                                  strips travel as stored, by pinned memory
        `-- cuda, bf16       CudaBfloat16  factors rounded to 8 bits; refused on a CPU

    strip (float16 in the store) -> float32 less a mean -> product in float32 -> float64 sum

Shifts are loops of `compiled` where the work is worth loading numba (`is_worth_compiling`), else
passes of numpy or torch. Products of float64 (`covariance`, `ridge`) are plain numpy.

| module | what | in |
|---|---|---|
| `backend` | `MatmulBackend`, `Cpu`, `Cuda`, choice of both; buffers | float32, float64 sums |
| `compiled` | the decorator of loops that numba compiles; cast, shift and sum in one | float32 |
| `neighbours` | the k nearest by cosine: `topk` of float32, ties in float64 | both |
| `ridge` | ridge regression to classes or targets: one eigendecomposition for every l2 | float64 |
| `l2_choice` | l2 by held-out or left-out images | float64 |
| `logistic` | logistic regression on shares of classes, by L-BFGS | float64 |

Loops that only one package uses stay there: `summaries/` (attention and residual branches),
`analyses/similarity/products`, `similarity/stacks`.

A loop or a kernel of our own stays where it saves 5 % or more of a whole command on a processor
that CI has; the scripts in `benchmarks/` say how much.
"""
