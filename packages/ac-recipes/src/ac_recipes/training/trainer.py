"""The training loop of a recipe, on one process or on many.

Read `train` from the top: it builds everything in order, shows what was asked for and what was applied, and steps.
"""

import math
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ac_recipes.errors import UsageError
from ac_recipes.invocation import Invocation
from ac_recipes.recipe import Recipe
from ac_recipes.trackers import open_trackers
from ac_recipes.training.batches import BatchPlan, GlobalOrder
from ac_recipes.training.console import RunConsole
from ac_recipes.training.distributed import DistributedSetup
from ac_recipes.training.faults import Faults
from ac_recipes.training.loop import Loop, Result
from ac_recipes.training.loss import HeadLoss, attach_loss
from ac_recipes.training.memory import PeakMemory
from ac_recipes.training.metrics import MetricsLog, StepFigures
from ac_recipes.training.model import build_model
from ac_recipes.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from ac_recipes.training.preflight import preflight
from ac_recipes.training.provenance import session
from ac_recipes.training.ranks import Ranks, joined_ranks
from ac_recipes.training.resume import go_on, open_run
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.saving import Saver
from ac_recipes.training.settings import settings_table
from ac_recipes.training.text import Sequences, cut_sequences, hash_of, read_documents, train_tokenizer


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
        plan = preflight(recipe, ranks.world_size)
        run = open_run(recipe, name, resume, ranks, console)
        faults = Faults(run, invocation, ranks)
        stack.enter_context(faults.explained())
        tokenizer, sequences = prepare_text(recipe, run, ranks, trained=resume is not None)
        model = build_model(recipe.model, tokenizer.get_vocab_size(), recipe.rng.seed, ranks.device)
        head_loss = attach_loss(model, recipe.loss_fn)
        model, report = DistributedSetup(recipe.distributed).apply(model, ranks)
        optimizer = build_optimizer(model.parameters(), recipe.optimizer)
        torch.manual_seed(recipe.rng.seed + ranks.rank)  # what the run draws from here on differs between ranks
        memory = PeakMemory(ranks.device)
        console.asked_applied(settings_table(recipe, report, plan, ranks, tokenizer, sequences, memory))
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
        done = 0 if resume is None else go_on(run, recipe, saver, ranks, console)
        trackers = []
        if ranks.is_first:
            run.write_session(session(invocation, ranks, done=done))
            trackers = stack.enter_context(open_trackers(recipe, run.path, done=done))
        trainer = Trainer(
            recipe=recipe,
            plan=plan,
            ranks=ranks,
            model=model,
            head_loss=head_loss,
            optimizer=optimizer,
            sequences=sequences,
            memory=memory,
            faults=faults,
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
            log=MetricsLog(run, ranks, console, trackers, recipe.step_scheduler.max_steps),
            faults=faults,
        )
        return loop.run()


def prepare_text(recipe: Recipe, run: RunFolder, ranks: Ranks, *, trained: bool) -> tuple[Tokenizer, Sequences]:
    """The tokenizer and the token sequences. Rank 0 trains the tokenizer; it is kept in the run's folder, so that
    every rank and every resumed run encode alike.

    Raises:
        UsageError: the text is too short; or a resumed run was trained on another, or its tokenizer is damaged.
    """
    documents = read_documents(recipe.dataset)
    found = hash_of(documents)
    if not trained and ranks.is_first:
        run.text_hash.write_text(found)
        train_tokenizer(documents, recipe.tokenizer.vocab_size).save(str(run.tokenizer))
    ranks.wait()
    if not run.text_hash.is_file() or run.text_hash.read_text() != found:
        raise UsageError(f"--resume: dataset.text is not the text that {run.path} was trained on")
    try:
        tokenizer = Tokenizer.from_file(str(run.tokenizer))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(f"--resume: {run.tokenizer} cannot be read: {error}") from error
    return tokenizer, cut_sequences(documents, tokenizer, recipe.dataset)


@dataclass(kw_only=True)
class Trainer:
    """The model and what a step needs; `steps_done` is all the state it has of its own."""

    recipe: Recipe
    plan: BatchPlan
    ranks: Ranks
    model: nn.Module
    head_loss: HeadLoss
    optimizer: Optimizer
    sequences: Sequences
    memory: PeakMemory
    faults: Faults
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.schedule = self.recipe.step_scheduler
        self.order = GlobalOrder(len(self.sequences.train), self.schedule.global_batch_size, self.recipe.rng.seed)

    def step(self) -> StepFigures:
        """One optimizer step over a global batch. Its loss is the mean over the batch's label tokens; without any, 0.

        Raises:
            RunError: the loss or the gradient norm is not finite; the weights are those of the step before.
        """
        started = time.perf_counter()
        microbatches = self.microbatches()
        ignored = self.recipe.loss_fn.ignore_index
        label_tokens = int(self.ranks.sum(sum(int((labels != ignored).sum()) for _, labels in microbatches)))
        rate = learning_rate(
            self.steps_done, self.schedule.max_steps, self.recipe.optimizer.lr, self.recipe.lr_scheduler
        )
        set_learning_rate(self.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, (inputs, labels) in enumerate(microbatches):
            with self.no_gradient_exchange(is_last=index == len(microbatches) - 1):
                loss = self.forward(inputs, labels, max(1, label_tokens))
                # DDP and FSDP2 average gradients over ranks; the loss is already divided by the tokens of all of them.
                (loss * self.ranks.world_size).backward()
            total += loss.detach()
        loss_value = self.ranks.sum(total.item())
        if not math.isfinite(loss_value):
            raise self.faults.not_finite("loss", loss_value, self.steps_done + 1)
        grad_norm = self.clip()
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

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of the next global batch: inputs and labels, int64 `[local_batch, sequence]` each.

        The ranks take consecutive shares, so that a global batch is the same on any number of ranks.
        """
        batch = self.order.batch(self.steps_done)
        mine = batch.chunk(self.ranks.world_size)[self.ranks.rank]
        windows = [self.sequences.train[ids].to(self.ranks.device) for ids in mine.split(self.plan.local)]
        return [(w[:, :-1], w[:, 1:]) for w in windows]

    def forward(self, inputs: Tensor, labels: Tensor, label_tokens: int) -> Tensor:
        """The loss summed over `labels` and divided by `label_tokens`, through the whole model and its wrappers."""
        with self.head_loss.labels(labels, label_tokens):
            return self.model(input_ids=inputs, use_cache=False).logits

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
            raise self.faults.not_finite("gradient norm", value, self.steps_done + 1)
        return value

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss a token over the held-out sequences, without dropout; None where nothing is held out.

        It draws no random numbers, so that how often it runs changes nothing of the training.
        """
        held_out = self.sequences.validation
        if not len(held_out):
            return None
        total = tokens = 0.0
        size = self.plan.local
        self.model.eval()
        # Every rank makes the same number of forwards, since FSDP2's are collective; the last may be empty of labels.
        for start in range(0, len(held_out), size * self.ranks.world_size):
            rows = torch.arange(start + self.ranks.rank * size, start + (self.ranks.rank + 1) * size)
            window = held_out[rows.clamp(max=len(held_out) - 1)].to(self.ranks.device)
            labels = window[:, 1:].clone()
            labels[rows >= len(held_out)] = self.recipe.loss_fn.ignore_index
            total += self.forward(window[:, :-1], labels, 1).item()
            tokens += int((labels != self.recipe.loss_fn.ignore_index).sum())
        self.model.train()
        return self.ranks.sum(total) / max(1.0, self.ranks.sum(tokens))
