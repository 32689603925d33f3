"""The training loop of a recipe, on one process or on many.

Read `train` from the top: it builds everything in order, shows what was asked for and what was applied, and steps.
"""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ac_recipes.data.packing import check_packing
from ac_recipes.data.prepare import Prepared, prepare
from ac_recipes.errors import RunError
from ac_recipes.lora import add_lora, save_adapter
from ac_recipes.model_config import check_positions
from ac_recipes.recipe import Recipe
from ac_recipes.training.batches import BatchPlan, GlobalOrder
from ac_recipes.training.checkpoint import load_checkpoint, save_checkpoint, whole_checkpoints
from ac_recipes.training.console import RunConsole
from ac_recipes.training.distributed import DistributedSetup
from ac_recipes.training.loss import HeadLoss, attach_loss
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.model import build_model
from ac_recipes.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from ac_recipes.training.preflight import preflight
from ac_recipes.training.ranks import Ranks, joined_ranks
from ac_recipes.training.resume import changes
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.settings import settings_table


@dataclass(frozen=True)
class Result:
    """Where a run left its files, and the losses it ended with (nats a token).

    `is_first`: whether this is rank 0, the one that speaks for all.
    """

    run: Path
    steps: int
    loss: float | None
    validation_loss: float | None
    is_first: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "run": str(self.run),
            "steps": self.steps,
            "loss": self.loss,
            "validation_loss": self.validation_loss,
        }


def train(recipe: Recipe, name: str, *, resume: Path | None = None, to_stderr: bool = False) -> Result:
    """Train `recipe` in this process, one of as many as torch's launcher says in the environment.

    Args:
        recipe: what to do.
        name: of the recipe; run folders are called after it.
        resume: the folder of an earlier run to go on with, from its last whole checkpoint.
        to_stderr: print there, and leave standard output to the caller.

    Raises:
        UsageError: the recipe does not fit this machine, these ranks or this data; nothing was trained.
        RunError: the run cannot go on; what it saved is kept.
    """
    with joined_ranks() as ranks:
        console = RunConsole(silent=not ranks.is_first, to_stderr=to_stderr)
        plan = preflight(recipe, ranks.world_size)
        run = open_run(recipe, name, resume, ranks, console)
        data = prepare(recipe, run, ranks, resumed=resume is not None)
        model = build_model(recipe.model, len(data.tokenizer), recipe.rng.seed, ranks.device)
        check_positions(recipe, model.config)
        if recipe.packed_sequence.packed_sequence_size:
            check_packing(model)
        if recipe.peft is not None:
            add_lora(model, recipe.peft, recipe.rng.seed)
        head_loss = attach_loss(model, recipe.loss_fn)
        model, report = DistributedSetup(recipe.distributed).apply(model, ranks)
        optimizer = build_optimizer(model.parameters(), recipe.optimizer)
        torch.manual_seed(recipe.rng.seed + ranks.rank)  # what the run draws from here on differs between ranks
        memory = PeakMemory(ranks.device)
        console.asked_applied(settings_table(recipe, report, plan, ranks, data, memory))
        console.line(f"run folder {run.path}")
        trainer = Trainer(
            recipe=recipe,
            plan=plan,
            run_folder=run,
            ranks=ranks,
            console=console,
            model=model,
            head_loss=head_loss,
            optimizer=optimizer,
            data=data,
            memory=memory,
        )
        result = trainer.run(resumed=resume is not None)
        if recipe.peft is not None:
            save_adapter(model, recipe.peft, recipe.model.pretrained_model_name_or_path, run.adapter, ranks)
        return result


def open_run(recipe: Recipe, name: str, resume: Path | None, ranks: Ranks, console: RunConsole) -> RunFolder:
    """The run's folder: a new one made by rank 0, or the resumed one."""
    if resume is not None:
        run = RunFolder(resume)
        if ranks.is_first:
            for path, was, now in changes(run, recipe):
                console.line(f"changed since the run was last started: {path}: {was} -> {now}")
        ranks.wait()
        return run
    path = RunFolder.create(Path(recipe.run.dir), name, recipe).path if ranks.is_first else None
    return RunFolder(Path(str(ranks.from_first(path))))


@dataclass(kw_only=True)
class Trainer:
    """One run: the step, what surrounds it, and nothing that is not needed to resume."""

    recipe: Recipe
    plan: BatchPlan
    run_folder: RunFolder
    ranks: Ranks
    console: RunConsole
    model: nn.Module
    head_loss: HeadLoss
    optimizer: Optimizer
    data: Prepared
    memory: PeakMemory
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.schedule = self.recipe.step_scheduler
        self.order = GlobalOrder(len(self.data.train), self.schedule.global_batch_size, self.recipe.rng.seed)

    def run(self, *, resumed: bool) -> Result:
        """Train to the last step."""
        if resumed:
            self.resume()
        validation_loss = self.validate() if self.steps_done == 0 else None
        loss = None
        while self.steps_done < self.schedule.max_steps:
            loss = self.step()
            if self.is_due(self.schedule.val_every_steps):
                validation_loss = self.validate()
            if self.recipe.checkpoint.enabled and self.is_due(self.schedule.ckpt_every_steps):
                self.save()
        self.console.line(f"done: {self.steps_done} steps | run folder {self.run_folder.path}")
        return Result(self.run_folder.path, self.steps_done, loss, validation_loss, self.ranks.is_first)

    def is_due(self, every: int | None) -> bool:
        """Whether something done every so many steps is due now; at the last step it always is."""
        at_the_end = self.steps_done == self.schedule.max_steps
        return at_the_end or (every is not None and self.steps_done % every == 0)

    def step(self) -> float:
        """One optimizer step over a global batch; returns its loss, the mean over the batch's label tokens."""
        started = time.perf_counter()
        microbatches = self.microbatches()
        ignored = self.recipe.loss_fn.ignore_index
        label_tokens = int(self.ranks.sum(sum(int((batch["labels"] != ignored).sum()) for batch in microbatches)))
        rate = learning_rate(
            self.steps_done, self.schedule.max_steps, self.recipe.optimizer.lr, self.recipe.lr_scheduler
        )
        set_learning_rate(self.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, batch in enumerate(microbatches):
            with self.no_gradient_exchange(is_last=index == len(microbatches) - 1):
                loss = self.forward(batch, max(1, label_tokens))
                # DDP and FSDP2 average gradients over ranks; the loss is already divided by the tokens of all of them.
                (loss * self.ranks.world_size).backward()
            total += loss.detach()
        loss_value = self.ranks.sum(total.item())
        if not math.isfinite(loss_value):
            raise RunError(self.not_finite("loss", loss_value))
        grad_norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        self.log(loss_value, grad_norm, rate, label_tokens, time.perf_counter() - started)
        return loss_value

    def microbatches(self) -> list[dict[str, Tensor]]:
        """This rank's share of the next global batch: named tensors `[local_batch, ...]`, the `labels` among them.

        The ranks take consecutive shares, so that a global batch is the same on any number of ranks.
        """
        batch = self.order.batch(self.steps_done)
        mine = batch.chunk(self.ranks.world_size)[self.ranks.rank]
        return [self.on_device(self.data.train[ids]) for ids in mine.split(self.plan.local)]

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a batch on this rank's device."""
        return {name: tensor.to(self.ranks.device) for name, tensor in batch.items()}

    def forward(self, batch: dict[str, Tensor], label_tokens: int) -> Tensor:
        """The loss summed over the labels of `batch` and divided by `label_tokens`, through the whole model and its
        wrappers. Label t belongs to the token after input t."""
        inputs = dict(batch)
        labels = inputs.pop("labels")
        with self.head_loss.labels(labels, label_tokens):
            return self.model(**inputs, use_cache=False).logits

    def no_gradient_exchange(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP exchanges gradients once a step. FSDP2 does so for every microbatch: what it keeps between them is then
        its shard, and not a whole gradient on every rank."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        return nullcontext()

    def clip(self) -> float:
        """Scale the gradients down to `clip_grad_norm.max_norm`; returns the norm before, over all ranks."""
        limit = self.recipe.clip_grad_norm.max_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(value):
            raise RunError(self.not_finite("gradient norm", value))
        return value

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss a token over the held-out sequences, without dropout; None where nothing is held out.

        It draws no random numbers, so that how often it runs changes nothing of the training.
        """
        held_out = self.data.validation
        if not len(held_out):
            return None
        total = tokens = 0.0
        size = self.plan.local
        self.model.eval()
        # Every rank makes the same number of forwards, since FSDP2's are collective; the last may be empty of labels.
        for start in range(0, len(held_out), size * self.ranks.world_size):
            rows = torch.arange(start + self.ranks.rank * size, start + (self.ranks.rank + 1) * size)
            batch = held_out[rows.clamp(max=len(held_out) - 1)]
            labels = batch["labels"]
            labels[rows >= len(held_out)] = self.recipe.loss_fn.ignore_index
            total += self.forward(self.on_device(batch), 1).item()
            tokens += int((labels != self.recipe.loss_fn.ignore_index).sum())
        self.model.train()
        mean = self.ranks.sum(total) / self.ranks.sum(tokens)
        self.console.line(f"step {self.steps_done}/{self.schedule.max_steps} | validation loss {mean:.4f}")
        if self.ranks.is_first:
            self.run_folder.write_metrics(step=self.steps_done, validation_loss=mean)
        return mean

    def save(self) -> None:
        """Write a checkpoint of this step."""
        folder = self.run_folder.checkpoints
        try:
            path = save_checkpoint(folder, self.steps_done, self.model, self.optimizer, self.ranks)
        except (OSError, RuntimeError, CheckpointException) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"the checkpoint of step {self.steps_done} cannot be written to {folder}: {reason}; older checkpoints "
                "are kept: make room, and go on with --resume"
            ) from error
        self.console.line(f"step {self.steps_done}/{self.schedule.max_steps} | checkpoint {path}")

    def resume(self) -> None:
        """Go on from the newest whole checkpoint of the run folder."""
        checkpoints = whole_checkpoints(self.run_folder.checkpoints)
        newest = self.ranks.from_first(checkpoints[-1] if checkpoints else None)
        if newest is None:
            raise RunError(f"{self.run_folder.checkpoints} holds no whole checkpoint to resume from")
        with_rng = load_checkpoint(newest, self.model, self.optimizer, self.ranks)
        self.steps_done = newest.step
        if self.ranks.is_first:
            self.run_folder.write_recipe(self.recipe)
            self.run_folder.drop_metrics_after(newest.step)
        note = "" if with_rng else " (random numbers restart: it was saved on another number of ranks)"
        self.console.line(f"resumed from {newest.path}, {newest.step} steps done{note}")
        if newest.step >= self.schedule.max_steps:
            self.console.line(
                f"nothing left to do: step_scheduler.max_steps is {self.schedule.max_steps}; raise it to go on"
            )

    def log(self, loss: float, grad_norm: float, rate: float, label_tokens: int, seconds: float) -> None:
        """One line of metrics a step; one printed line every `log_every_steps`."""
        peak = int(self.ranks.max(self.memory.read()))
        if self.ranks.is_first:
            self.run_folder.write_metrics(
                step=self.steps_done,
                loss=loss,
                grad_norm=grad_norm,
                lr=rate,
                label_tokens=label_tokens,
                seconds=seconds,
                peak_bytes=peak,
            )
        if self.steps_done == 1 or self.is_due(self.schedule.log_every_steps):
            self.console.step(
                self.steps_done,
                self.schedule.max_steps,
                loss=loss,
                grad_norm=grad_norm,
                lr=rate,
                peak_bytes=peak,
                rate=label_tokens / seconds,
            )

    def not_finite(self, what: str, value: float) -> str:
        """What to say when the loss or the gradient is NaN or infinite. The optimizer has not stepped on it."""
        saved = whole_checkpoints(self.run_folder.checkpoints)
        kept = f"the newest checkpoint is {saved[-1].path}" if saved else "no checkpoint was written yet"
        return (
            f"the {what} is {value} at step {self.steps_done + 1}; {kept}. Try a smaller optimizer.lr, a longer "
            "lr_scheduler.lr_warmup_steps or a smaller clip_grad_norm.max_norm"
        )
