"""Peak memory of loading the tower of a vision-language model, and what its language model
receives, from a checkpoint in many files whose language model is larger than the tower by far.

    python benchmarks/tower_memory.py                 # a language model of 3 GB in bfloat16
    python benchmarks/tower_memory.py --layers 32 --record

The claims: the peak is that of the same part with random weights, but for the file that is open;
and it does not depend on the language model. Beside it the library loads the whole model,
in float32 like ours (in bfloat16 it maps the files, whose pages count once they are used). The
checkpoint is Qwen2.5-VL's class, its values all 0 but the tower's, made in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from common import Result, add_record_option, machine, peak_rss, record

WIDTH = 2048
MAKE = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file
folder, layers, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
vision = dict(depth=16, hidden_size=640, num_heads=10, intermediate_size=1708)
vision |= dict(out_hidden_size=width)
text = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=4 * width)
text |= dict(num_attention_heads=16, num_key_value_heads=2, vocab_size=50000)
text |= dict(layer_types=["full_attention"] * layers)
config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text)
config.save_pretrained(folder)
transformers.Qwen2VLImageProcessor().save_pretrained(folder)
with torch.device("meta"):
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
parts = {}
for name, x in model.state_dict().items():
    n = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
    layer = next((w for w in n.split(".") if w.isdigit()), "")
    parts.setdefault("visual" if "visual" in n else f"text{layer}", {})[n] = tuple(x.shape)
where, sizes = {}, {"visual": 0, "text": 0}
for part, shapes in parts.items():
    kind = torch.randn if part == "visual" else torch.zeros
    tensors = {n: kind(shape, dtype=torch.float32).bfloat16() for n, shape in shapes.items()}
    file = f"model-{part}.safetensors"
    save_file(tensors, folder / file, {"format": "pt"})
    where |= dict.fromkeys(tensors, file)
    sizes[part[:6] if part == "visual" else "text"] += (folder / file).stat().st_size
index = json.dumps({"metadata": {}, "weight_map": where})
(folder / "model.safetensors.index.json").write_text(index)
print(sizes["visual"], sizes["text"])
"""
OURS = "import sys; from vitsee_core.models.load import load_model; "
OURS += "load_model(sys.argv[1], img_size=112, random_init=eval(sys.argv[2]))"
WHOLE = "import sys, torch, transformers; "
WHOLE += "transformers.AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="of the language model")
    parser.add_argument("--folder", help="where the checkpoint is written, and deleted")
    add_record_option(parser)
    args = parser.parse_args()
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        made = [sys.executable, "-c", MAKE, name, str(args.layers), str(WIDTH)]
        done = subprocess.run(made, check=True, capture_output=True, text=True)
        tower, language = (int(word) / 1e6 for word in done.stdout.split())
        print(f"on disk: the tower {tower:.0f} MB, the language model {language:.0f} MB")
        rows.append(Result("on disk: files of the tower", tower, None, None, "MB"))
        rows.append(
            Result("on disk: files of the language model", language, None, None, "MB")
        )
        whole = peak_rss([sys.executable, "-c", WHOLE, name]) / 1e6
        print(f"the whole model by transformers: {whole:.0f} MB")
        for part in ("visual", "language-in"):
            model = f"transformers:{name}#{part}"
            random, own = (
                peak_rss([sys.executable, "-c", OURS, model, seed]) / 1e6
                for seed in ("0", "None")
            )
            print(
                f"#{part}: random weights {random:.0f} MB, its own {own:.0f} MB",
                flush=True,
            )
            what = f"#{part} with its weights, against the whole model by transformers"
            rows.append(Result(f"#{part} with random weights", random, None, None, "MB"))
            rows.append(Result(what, own, whole, whole / own, "MB"))
    if args.record:
        title = "Peak memory of a tower beside a large language model"
        record("tower-memory", title, rows)


if __name__ == "__main__":
    main()
