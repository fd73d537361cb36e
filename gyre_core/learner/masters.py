"""The float32 masters of the weights that are trained, their AdamW moments, and copies of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from gyre_core.config.sections import LearningConfig

_ALIGNMENT = 16
"""Elements, 64 bytes of float32: where a parameter begins in a flat tensor, as vector instructions and GPUs need it."""


class MasterWeights:
    """The weights that the optimiser moves, in float32 whatever the model computes in.

    In float32 the model's parameters are the masters; else the model holds a rounded copy, and gradients add up in
    float32. Small updates survive that would be lost below the last place of a bfloat16 weight.

    Masters, gradients and moments are one flat tensor each, of which every parameter has a part, so that what happens
    to all of them alike is one operation.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: LearningConfig, dtype: torch.dtype, of: str
    ) -> None:
        """Take over a model's parameters: they become float32 masters, then are cast to `dtype`.

        `of` names the setting that the model comes from, for messages.
        """
        self._of = of
        self._parameters = dict(parameters)
        self._rounded = dtype != torch.float32
        self._weights = nn.Parameter(_flat_zeros(self._parameters))
        self._gradient = self._weights.grad = torch.zeros_like(self._weights)
        self._optimizer = torch.optim.AdamW(
            [self._weights], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        # Made now, not at the first update, so that a snapshot always has the same tensors.
        self._optimizer.state[self._weights] = {
            "step": torch.zeros((), dtype=torch.float32, device=self._weights.device),
            "exp_avg": torch.zeros_like(self._weights),
            "exp_avg_sq": torch.zeros_like(self._weights),
        }
        for (name, master), gradient in zip(
            self._parts(self._weights.detach()).items(), self._parts(self._gradient).values(), strict=True
        ):
            parameter = self._parameters[name].requires_grad_(True)
            master.copy_(parameter.data)
            parameter.data = master.to(dtype)
            parameter.grad = None if self._rounded else gradient
        self.updates = 0
        """Optimiser steps since the run began."""
        self._snapshot: dict[str, torch.Tensor] = {}
        self._snapshot_updates: int | None = None

    def zero_gradients(self) -> None:
        """Forget the accumulated gradients."""
        self._gradient.zero_()
        if self._rounded:
            for parameter in self._parameters.values():
                parameter.grad = None

    def collect_gradients(self) -> None:
        """Add the gradients of one backward pass to the masters'."""
        if self._rounded:
            for name, gradient in self._parts(self._gradient).items():
                parameter = self._parameters[name]
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
                    parameter.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients together, a scalar."""
        return torch.linalg.vector_norm(self._gradient)

    def non_finite_gradients(self) -> list[str]:
        """Names of the parameters whose gradient has an infinite or undefined element."""
        return [name for name, gradient in self._parts(self._gradient).items() if not gradient.isfinite().all()]

    def step(self, lr: float, norm: torch.Tensor, max_norm: float) -> None:
        """Scale gradients of norm `norm` down to `max_norm`, and move the weights by one step of AdamW."""
        nn.utils.clip_grads_with_norm_(self._weights, max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.updates += 1
        self._round()

    def snapshot(self) -> None:
        """Copy weights, moments and the step counter to host memory, over the previous snapshot."""
        for kind, flat in self._flat_tensors().items():
            if kind not in self._snapshot:
                self._snapshot[kind] = torch.empty_like(flat, device="cpu")
            self._snapshot[kind].copy_(flat)
        self._snapshot_updates = self.updates

    def restore(self) -> None:
        """Go back to the snapshot, bit for bit."""
        assert self._snapshot_updates is not None, "restore without a snapshot"
        for kind, flat in self._flat_tensors().items():
            flat.copy_(self._snapshot[kind])
        self._set_updates(self._snapshot_updates)

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
        for name, tensor in self._tensors():
            tensor.copy_(tensors[name])
        self._set_updates(counters["updates"])

    def _flat_tensors(self) -> dict[str, torch.Tensor]:
        """What a snapshot keeps, by kind."""
        moments = self._optimizer.state[self._weights]
        return {
            "weight": self._weights.detach(),
            "first_moment": moments["exp_avg"],
            "second_moment": moments["exp_avg_sq"],
        }

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for kind, flat in self._flat_tensors().items():
            for name, part in self._parts(flat).items():
                yield f"{kind}.{name}", part

    def _parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's part of a flat tensor, in the parameter's shape."""
        pieces = flat.split([_held(parameter) for parameter in self._parameters.values()])
        return {
            name: piece[: parameter.numel()].view(parameter.shape)
            for (name, parameter), piece in zip(self._parameters.items(), pieces, strict=True)
        }

    def _set_updates(self, updates: int) -> None:
        """Take over the number of updates that the weights have had."""
        self._optimizer.state[self._weights]["step"].fill_(updates)
        self.updates = updates
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Bring the model's rounded copy up to date."""
        if self._rounded:
            for name, master in self._parts(self._weights).items():
                self._parameters[name].copy_(master)


def _flat_zeros(parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
    """Room for all parameters, one after the other, in float32."""
    device = next(iter(parameters.values())).device
    return torch.zeros(sum(_held(parameter) for parameter in parameters.values()), device=device)


def _held(parameter: nn.Parameter) -> int:
    """Elements of a flat tensor that a parameter takes."""
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
