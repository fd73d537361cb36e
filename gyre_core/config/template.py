"""The configuration that `gyre init` writes: small, commented, and runnable as it stands."""

TEMPLATE = """\
# A first GRPO run: a tiny policy learns sums of two-digit numbers on a CPU, in a minute or two.
#   gyre train --config gyre.yaml --dry-run     shows every setting and the plan
#   gyre preflight --config gyre.yaml           checks models, rewards and storage
#   gyre train --config gyre.yaml               trains; add --section.field VALUE to change a setting
# All settings: gyre train --help. Paths in this file start at its folder.

experiment:
  name: first-run              # the run's folder is runs/NAME/RUN_ID
  algorithm: grpo
  seed: 1                      # the same seed repeats the run
  steps: 60                    # RL steps: generate, score, draw, update

models:
  policy: tiny-qwen3           # made on the spot; or a Hugging Face folder of your own

data:
  path: arithmetic             # built in; or prompts.jsonl, one {"prompt": ..., "answer": ...} a line

rollout:
  batch_size: 128              # prompts a step
  samples_per_prompt: 8        # completions of each, compared with each other
  max_tokens: 5                # tokens of a completion at the most: three digits and an end
  temperature: 1.0

reward:
  functions:                   # the reward is their weighted sum
    - path: partial_match      # built in; or my_reward.py:score, in TRL's signature
      weight: 1.0

learning:
  lr: 1e-3                     # right for a tiny policy; for a real one begin at 1e-6
  schedule: linear             # falls to final_lr_fraction of lr
  update_steps: 8              # optimiser updates a step, of 128 / 8 = 16 prompts each
  clip_low: 0.2
  clip_high: 0.28
  kl_coef: 0.0                 # above 0: a penalty for leaving the reference model

evaluation:
  every: 20                    # RL steps between evaluations on held-out prompts
"""
