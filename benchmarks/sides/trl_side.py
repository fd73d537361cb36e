"""TRL's side of the benchmark: a `GRPOTrainer` that waits for a command before every block of steps.

Runs in TRL's own environment: `python trl_side.py SETTINGS`, settings as JSON (`Case` of `trainer_vs_trl.py`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from protocol import Commands
from reward import score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer


class StepOnCommand(TrainerCallback):
    """Lets the trainer take as many steps (each of `updates` optimiser updates) as the benchmark asks for."""

    def __init__(self, commands: Commands, updates: int, prompt_tokens: int) -> None:
        self._commands = commands
        self._updates = updates
        self._prompt_tokens = prompt_tokens
        self._asked = 0
        self._left = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        if self._left == 0:
            self._reply(state.log_history)
            self._asked = self._left = self._commands.next_steps()
            if self._asked == 0:
                os._exit(0)  # the trainer has no other way to stop before a step
        self._left -= 1

    def _reply(self, log: list[dict[str, float]]) -> None:
        rows = log[len(log) - self._asked :]
        lengths = [row["completions/mean_length"] for row in rows]
        # Prompts of one length: each of a step's rows is as wide as its longest, in every update.
        widths = [self._prompt_tokens + row["completions/max_length"] for row in rows]
        used = [self._prompt_tokens + length for length in lengths]
        padding = [1.0 - tokens / width for tokens, width in zip(used, widths, strict=True)]
        self._commands.reply({"rewards": [row["reward"] for row in rows], "lengths": lengths, "padding": padding})


def make_config(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's configuration of the same run."""
    updates = settings["updates"]
    samples = settings["prompts"] * settings["samples"]
    rows = settings["trl_rows"]
    return GRPOConfig(
        output_dir=str(Path(settings["folder"]) / "trl"),
        per_device_train_batch_size=rows,
        steps_per_generation=samples // rows,
        gradient_accumulation_steps=samples // updates // rows,
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        max_steps=10**6,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over tokens
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Build the trainer and train until the benchmark has no more commands."""
    settings = json.loads(sys.argv[1])
    commands = Commands()
    torch.set_num_threads(settings["threads"])
    folder = Path(settings["folder"])
    policy = folder / "policy"
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    prompts = Dataset.from_json(str(folder / "prompts.jsonl"))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=score,
        args=make_config(settings),
        train_dataset=prompts,
    )
    trainer.remove_callback(PrinterCallback)
    prompt_tokens = len(tokenizer(prompts[0]["prompt"])["input_ids"])
    trainer.add_callback(StepOnCommand(commands, settings["updates"], prompt_tokens))
    trainer.train()


if __name__ == "__main__":
    main()
