"""The training loop of a recipe, on one process or on many.

Read `train` from the top: it builds everything in order, shows what was asked for and what was applied, and steps.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ac_recipes.analysis.planning import recipe_to_train
from ac_recipes.data.prepare import Prepared, prepare
from ac_recipes.invocation import Invocation
from ac_recipes.lora import save_adapter
from ac_recipes.parallel.data import no_gradient_exchange
from ac_recipes.parallel.gradients import clip_grad_norm
from ac_recipes.rank_process import leave_run
from ac_recipes.recipe import Recipe
from ac_recipes.trackers import open_trackers
from ac_recipes.training.batches import BatchPlan, GlobalOrder, check_filled, limited
from ac_recipes.training.console import RunConsole
from ac_recipes.training.faults import Faults, NotFiniteError
from ac_recipes.training.loop import Loop, Result
from ac_recipes.training.loss import HeadLoss, attach_loss
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.metrics import MetricsLog, StepFigures
from ac_recipes.training.model import trainable_model
from ac_recipes.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from ac_recipes.training.preflight import preflight, setup_of
from ac_recipes.training.provenance import session
from ac_recipes.training.ranks import Ranks, joined_ranks
from ac_recipes.training.rescue import LastStep, Rescue
from ac_recipes.training.resume import go_on, open_run
from ac_recipes.training.rng import seed_step
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.run_lock import alone_in
from ac_recipes.training.saving import Saver
from ac_recipes.training.settings import settings_table
from ac_recipes.training.untrained import check_all_get_gradients


def train(
    recipe: Recipe,
    name: str,
    *,
    resume: Path | None = None,
    to_stderr: bool = False,
    invocation: Invocation | None = None,
) -> Result:
    """Train `recipe` in this process, one of as many as torch's launcher says in the environment.

    Args:
        recipe: what to do.
        name: of the recipe; run folders are called after it.
        resume: the folder of an earlier run to go on with, from its last whole checkpoint.
        to_stderr: print there, and leave standard output to the caller.
        invocation: the command that this run goes back to; it is kept, and messages name commands that go with it.

    Raises:
        UsageError: the recipe does not fit this machine, these ranks or this data; nothing was trained.
        RunError: the run cannot go on; what it saved is kept.
    """
    invocation = invocation or Invocation(("train", name))
    with joined_ranks() as ranks, ExitStack() as stack:
        console = RunConsole(silent=not ranks.is_first, to_stderr=to_stderr)
        faults = Faults(None if resume is None else RunFolder(resume), invocation, ranks, recipe)
        stack.enter_context(faults.explained())
        plan = preflight(recipe, ranks.world_size)
        recipe = recipe_to_train(recipe, ranks)
        faults.run = run = open_run(recipe, name, resume, ranks, console)
        stack.enter_context(alone_in(run, ranks, console))
        leave_run(run.path)
        data = prepare(recipe, run, ranks, resumed=resume is not None)
        check_filled(recipe.step_scheduler, len(data.train))
        model, frozen = trainable_model(recipe, data, ranks.device)
        head_loss = attach_loss(model, recipe.loss_fn)
        check_all_get_gradients(model, head_loss, data, recipe, ranks)
        parallel = setup_of(recipe).apply(model, ranks)
        model = parallel.model
        optimizer = parallel.finish(build_optimizer(model.parameters(), recipe.optimizer))
        memory = PeakMemory(ranks.device)
        console.asked_applied([*settings_table(recipe, parallel, plan, ranks, data, memory), *frozen])
        console.line(f"run folder {run.path}")
        saver = Saver(
            config=recipe.checkpoint,
            folder=run.checkpoints,
            ranks=ranks,
            console=console,
            faults=faults,
            model=model,
            optimizer=optimizer,
        )
        resumed = None if resume is None else go_on(run, recipe, saver, ranks, console)
        done = 0 if resumed is None else resumed.step
        trackers = []
        if ranks.is_first:
            run.write_session(session(invocation, ranks, done=done))
            trackers = stack.enter_context(open_trackers(recipe, run.path, done=done))
        trainer = Trainer(
            recipe=recipe,
            plan=plan,
            ranks=ranks,
            data_ranks=parallel.data,
            loss_factor=parallel.loss_factor,
            model=model,
            head_loss=head_loss,
            optimizer=optimizer,
            data=data,
            memory=memory,
            steps_done=done,
        )
        loop = Loop(
            recipe=recipe,
            folder=run.path,
            invocation=invocation,
            ranks=ranks,
            console=console,
            trainer=trainer,
            saver=saver,
            log=MetricsLog(run, ranks, console, trackers, trainer.schedule.max_steps),
            faults=faults,
            rescue=Rescue(ranks, saver, faults, trainer),
            resumed=resumed,
        )
        result = loop.run()
        run.check_there()
        if recipe.peft is not None:
            save_adapter(model, recipe.peft, recipe.model.pretrained_model_name_or_path, run.adapter, ranks)
        return result


@dataclass(kw_only=True)
class Trainer:
    """The model and what a step needs; `steps_done` is all the state it has of its own.

    ranks, data_ranks: this process among all of the run, and among those with different batches.
    loss_factor: see `Parallel.loss_factor`.
    """

    recipe: Recipe
    plan: BatchPlan
    ranks: Ranks
    data_ranks: Ranks
    loss_factor: int
    model: nn.Module
    head_loss: HeadLoss
    optimizer: Optimizer
    data: Prepared
    memory: PeakMemory
    steps_done: int = 0

    def __post_init__(self) -> None:
        is_wanted = self.recipe.checkpoint.enabled
        self.last = LastStep(self.model, self.optimizer, is_wanted=is_wanted)
        self.schedule = limited(self.recipe.step_scheduler, len(self.data.train))
        self.order = GlobalOrder(len(self.data.train), self.schedule.global_batch_size, self.recipe.rng.seed)

    def step(self) -> StepFigures:
        """One optimizer step over a global batch. Its loss is the mean over the batch's label tokens; without any, 0.

        Raises:
            NotFiniteError: the loss or the gradient norm is not finite, on all ranks; the weights are those of the step
                before.
        """
        started = time.perf_counter()
        # What a step draws differs between ranks with different batches, not between those with one.
        seed_step(self.recipe.rng.seed, self.steps_done, self.data_ranks.rank)
        self.last.begin()
        microbatches = self.microbatches()
        ignored = self.recipe.loss_fn.ignore_index
        label_tokens = int(self.data_ranks.sum(sum(int((batch["labels"] != ignored).sum()) for batch in microbatches)))
        rate = learning_rate(
            self.steps_done, self.schedule.max_steps, self.recipe.optimizer.lr, self.recipe.lr_scheduler
        )
        set_learning_rate(self.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        all_microbatches = len(microbatches) * self.data_ranks.world_size
        for index, batch in enumerate(microbatches):
            with no_gradient_exchange(self.model, is_last=index == len(microbatches) - 1):
                loss = self.forward(batch, max(1, label_tokens), auxiliary_share=1 / all_microbatches)
                (loss * self.loss_factor).backward()  # the loss is divided by the tokens of all ranks
            total += loss.detach()
        loss_value = self.data_ranks.sum(total.item())
        if not self.is_finite_everywhere(loss_value):
            raise NotFiniteError("loss", loss_value, self.steps_done + 1)
        grad_norm = clip_grad_norm(self.model.parameters(), self.recipe.clip_grad_norm.max_norm, self.ranks)
        if not math.isfinite(grad_norm):  # the same on all ranks
            raise NotFiniteError("gradient norm", grad_norm, self.steps_done + 1)
        with self.last.updating():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps_done += 1
        return StepFigures(
            step=self.steps_done,
            loss=loss_value,
            grad_norm=grad_norm,
            lr=rate,
            label_tokens=label_tokens,
            seconds=time.perf_counter() - started,
            peak_bytes=int(self.ranks.max(self.memory.read())),
        )

    def microbatches(self) -> list[dict[str, Tensor]]:
        """This rank's share of the next global batch: named tensors `[local_batch, ...]`, the `labels` among them.

        The data-parallel ranks take consecutive shares, so that a global batch is the same on any number of ranks.
        """
        batch = self.order.batch(self.steps_done)
        mine = batch.chunk(self.data_ranks.world_size)[self.data_ranks.rank]
        return [self.on_device(self.data.train[ids]) for ids in mine.split(self.plan.local)]

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a batch on this rank's device."""
        return {name: tensor.to(self.ranks.device) for name, tensor in batch.items()}

    def forward(self, batch: dict[str, Tensor], label_tokens: int, auxiliary_share: float = 0.0) -> Tensor:
        """The loss summed over the labels of `batch` and divided by `label_tokens`, through the whole model and its
        wrappers. Label t belongs to the token after input t.

        A model that balances its experts adds `auxiliary_share` of that loss, which is one of each microbatch.
        """
        inputs = dict(batch)
        labels = inputs.pop("labels")
        with self.head_loss.labels(labels, label_tokens):
            output = self.model(**inputs, use_cache=False)
        return self.head_loss.total(output, auxiliary_share)

    def is_finite_everywhere(self, loss: float) -> bool:
        """Whether `loss`, which the data-parallel ranks agree on, is finite on those with the same batch as well."""
        if self.ranks.world_size == self.data_ranks.world_size:
            return math.isfinite(loss)
        return not self.ranks.max(not math.isfinite(loss))

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
        for start in range(0, len(held_out), size * self.data_ranks.world_size):
            rows = torch.arange(start + self.data_ranks.rank * size, start + (self.data_ranks.rank + 1) * size)
            batch = held_out[rows.clamp(max=len(held_out) - 1)]
            labels = batch["labels"]
            labels[rows >= len(held_out)] = self.recipe.loss_fn.ignore_index
            total += self.forward(self.on_device(batch), 1).item()
            tokens += int((labels != self.recipe.loss_fn.ignore_index).sum())
        self.model.train()
        return self.data_ranks.sum(total) / max(1.0, self.data_ranks.sum(tokens))
