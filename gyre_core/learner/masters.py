"""The float32 masters of the weights that are trained, their AdamW moments, and copies of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from gyre_core.config.sections import LearningConfig


class MasterWeights:
    """The weights that the optimiser moves, in float32 whatever the model computes in.

    In float32 the model's parameters are the masters; else the model holds a rounded copy, and gradients add up in
    float32. Small updates survive that would be lost below the last place of a bfloat16 weight.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: LearningConfig, dtype: torch.dtype, of: str
    ) -> None:
        """Take over a model's parameters: they become float32 masters, then are cast to `dtype`.

        `of` names the setting that the model comes from, for messages.
        """
        self._of = of
        self._parameters = dict(parameters)
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()
            self._masters[name] = parameter if dtype == torch.float32 else nn.Parameter(parameter.data)
            self._masters[name].grad = torch.zeros_like(parameter)
            parameter.data = parameter.data.to(dtype)
        self._rounded = dtype != torch.float32
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        for master in self._masters.values():
            # Made now, not at the first update, so that a snapshot always has the same tensors.
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        self.updates = 0
        """Optimiser steps since the run began."""
        self._snapshot: dict[str, torch.Tensor] = {}
        self._snapshot_updates: int | None = None

    def zero_gradients(self) -> None:
        """Forget the accumulated gradients."""
        self._optimizer.zero_grad(set_to_none=False)
        if self._rounded:
            for parameter in self._parameters.values():
                parameter.grad = None

    def collect_gradients(self) -> None:
        """Add the gradients of one backward pass to the masters'."""
        if self._rounded:
            for master, parameter in zip(self._masters.values(), self._parameters.values(), strict=True):
                if parameter.grad is not None:
                    assert master.grad is not None
                    master.grad.add_(parameter.grad)
                    parameter.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients together, a scalar."""
        return nn.utils.get_total_norm([master.grad for master in self._masters.values() if master.grad is not None])

    def non_finite_gradients(self) -> list[str]:
        """Names of the parameters whose gradient has an infinite or undefined element."""
        return [
            name
            for name, master in self._masters.items()
            if master.grad is not None and not master.grad.isfinite().all()
        ]

    def step(self, lr: float, norm: torch.Tensor, max_norm: float) -> None:
        """Scale gradients of norm `norm` down to `max_norm`, and move the weights by one step of AdamW."""
        nn.utils.clip_grads_with_norm_(self._masters.values(), max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.updates += 1
        self._round()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Copy weights, moments and the step counter to host memory, over the previous snapshot."""
        for name, tensor in self._tensors():
            if name not in self._snapshot:
                self._snapshot[name] = torch.empty_like(tensor, device="cpu")
            self._snapshot[name].copy_(tensor)
        self._snapshot_updates = self.updates

    def restore(self) -> None:
        """Go back to the snapshot, bit for bit."""
        assert self._snapshot_updates is not None, "restore without a snapshot"
        self._copy_from(self._snapshot, self._snapshot_updates)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Weights and moments by name, and the step counter; the live tensors, to be written before the next step."""
        return dict(self._tensors()), {"updates": self.updates}

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> None:
        """Take over what `state` returned; raises ValueError when it is of another model."""
        expected = {name: tuple(tensor.shape) for name, tensor in self._tensors()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wrong := sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name)):
            raise ValueError(
                f"the learner's state does not fit this model: {wrong[0]} has shape {given.get(wrong[0])}, expected "
                f"{expected.get(wrong[0])} ({len(wrong)} tensors differ); resume with the run's own {self._of}"
            )
        self._copy_from(tensors, counters["updates"])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in self._masters.items():
            moments = self._optimizer.state[master]
            yield f"weight.{name}", master.detach()
            yield f"first_moment.{name}", moments["exp_avg"]
            yield f"second_moment.{name}", moments["exp_avg_sq"]

    @torch.no_grad()
    def _copy_from(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        for name, tensor in self._tensors():
            tensor.copy_(tensors[name])
        for master in self._masters.values():
            self._optimizer.state[master]["step"].fill_(updates)
        self.updates = updates
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Bring the model's rounded copy up to date."""
        if self._rounded:
            for master, parameter in zip(self._masters.values(), self._parameters.values(), strict=True):
                parameter.copy_(master)
