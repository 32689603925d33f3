"""A whole training step that can be run again and again from the same weights."""

import math
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

from ac_recipes.analysis.memory import Timeline, bytes_of, record_memory
from ac_recipes.analysis.subject import Subject
from ac_recipes.training.batches import BatchPlan
from ac_recipes.training.optimizer import build_optimizer, set_learning_rate


class RepeatableStep:
    """Forward, backward, gradient clipping and the optimizer's step, on the subject's batch; returns the loss.

    The optimizer works as ever, at a learning rate of zero: every step sees the same weights, and the same random
    numbers, so that steps under different policies can be compared.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._optimizer = build_optimizer(subject.model.parameters(), subject.recipe.optimizer)
        set_learning_rate(self._optimizer, 0.0)
        self._max_norm = subject.recipe.clip_grad_norm.max_norm

    def __call__(self) -> float:
        loss = self._microbatch()
        max_norm = math.inf if self._max_norm is None else self._max_norm
        nn.utils.clip_grad_norm_(self.subject.model.parameters(), max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _microbatch(self) -> Tensor:
        subject = self.subject
        torch.manual_seed(subject.recipe.rng.seed)
        loss = subject.model(**subject.batch)
        loss.backward()
        return loss.detach()

    def timed(self) -> float:
        """Seconds of one step."""
        wait = self._waiter()
        wait()
        started = perf_counter()
        self()
        wait()
        return perf_counter() - started

    def recorded(self) -> tuple[Timeline, int]:
        """The memory of one step over time, and its peak in bytes: on CUDA what `torch.cuda.max_memory_allocated` says.

        The model, its optimizer's state and the batch are included. Run a step before, so that the state is there. Of a
        step of several microbatches it is the second, which finds the gradients of the first.
        """
        device = self.subject.device
        if BatchPlan.of(self.subject.recipe.step_scheduler, 1).accumulation > 1:
            self._microbatch()
        if device.type != "cuda":
            timeline = record_memory(self, device, bytes_of(self._lasting()))
            return timeline, timeline.peak
        torch.cuda.reset_peak_memory_stats(device)
        self()
        peak = torch.cuda.max_memory_allocated(device)
        return record_memory(self, device, torch.cuda.memory_allocated(device)), peak

    def drop_gradients(self) -> None:
        """Forget what a step that broke off has left."""
        self._optimizer.zero_grad(set_to_none=True)

    def _lasting(self) -> list[Tensor]:
        model, batch = self.subject.model, self.subject.batch.values()
        state = [value for of_one in self._optimizer.state.values() for value in of_one.values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        lasting = (*model.parameters(), *model.buffers(), *batch, *state, *gradients)
        return [value for value in lasting if isinstance(value, Tensor)]

    def _waiter(self) -> Callable[[], object]:
        device = self.subject.device
        return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
