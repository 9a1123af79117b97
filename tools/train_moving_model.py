"""Train the small VideoMAE of `vitsee study clips --quick` on the directions of moving shapes.

    python tools/train_moving_model.py

4,000 clips that the study's sets do not hold, 12 passes, from scratch and seeded; a linear layer on
the mean of the tokens tells four directions and is thrown away. Writes
vitsee_core/demo/moving.safetensors, rounded to float16, and prints after each pass how many of the
study's test clips are told right as they are, with their frames in another order, and as one frame
again and again. Takes two minutes of one core.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from vitsee_core.demo.moving import CLIPS, DIRECTIONS, FRAMES, MODEL, SEEDS, SIZE, clips

# As the study's recipe builds it.
SHAPE = {"patch_size": 8, "tubelet_size": 2, "hidden_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "intermediate_size": 128}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
N_CLIPS, PASSES, BATCH, RATE = 4000, 12, 64, 2e-3
SHUFFLED = (3, 6, 0, 5, 1, 7, 2, 4)


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """(clips, frames, channels, height, width) normalised, and (clips,) directions."""
    names, pixels = zip(*clips(n, seed), strict=True)
    x = torch.from_numpy(np.stack(pixels)).permute(0, 1, 4, 2, 3).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (x - mean) / std, torch.tensor([[*DIRECTIONS].index(name) for name in names])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library: Any = transformers
    config = library.VideoMAEConfig(image_size=SIZE, num_frames=FRAMES, **SHAPE, **HEADS)
    model = library.VideoMAEModel(config)
    head = nn.Linear(SHAPE["hidden_size"], len(DIRECTIONS))
    x, y = data(N_CLIPS, 0)
    test, answers = data(CLIPS["val"], SEEDS["val"])
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.05)
    steps = PASSES * N_CLIPS // BATCH
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    order = torch.Generator().manual_seed(0)

    def told(these: Tensor) -> float:
        with torch.inference_mode():
            found = head(model(these).last_hidden_state.mean(1)).argmax(1)
        return float((found == answers).float().mean())

    for number in range(PASSES):
        model.train()
        shuffled = torch.randperm(N_CLIPS, generator=order)
        for rows in shuffled[: N_CLIPS // BATCH * BATCH].split(BATCH):
            found = head(model(x[rows]).last_hidden_state.mean(1))
            loss = nn.functional.cross_entropy(found, y[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
        model.eval()
        still = test[:, 3:4].expand(-1, FRAMES, -1, -1, -1)
        shares = [told(these) for these in (test, test[:, list(SHUFFLED)], still)]
        print(
            f"pass {number}: {shares[0]:.3f}, shuffled {shares[1]:.3f}, still {shares[2]:.3f}"
        )
    save_file(
        {name: value.half().contiguous() for name, value in model.state_dict().items()},
        MODEL,
    )


if __name__ == "__main__":
    main()
