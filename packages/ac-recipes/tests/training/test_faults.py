"""What ends a run is told in one line, with what is kept and the command that goes on."""

import errno
import re
import resource
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ac_recipes.errors import LostPeerError, RankError, RunError
from ac_recipes.invocation import Invocation
from ac_recipes.reader import read_recipe, split_overrides
from ac_recipes.recipe import Recipe
from ac_recipes.training.faults import Faults, NotFiniteError, is_disk_full, is_out_of_memory
from ac_recipes.training.manifest import Checkpoint, record_files, write_manifest
from ac_recipes.training.memory import memory_limit
from ac_recipes.training.ranks import Ranks
from ac_recipes.training.run_folder import RunFolder
from ac_recipes.training.trainer import Trainer, train

INVOCATION = Invocation(("train", "tiny.yaml", "--nproc-per-node", "2", "--optimizer.lr", "0.1", "--json"))
MACHINE = f"{memory_limit(torch.device('cpu')) / 2**30:.1f} GiB"


@pytest.fixture
def told(tmp_path, tiny):
    """The error that a run with a checkpoint of step 3 ends with when `error` is raised in step 4; RUN in place of its
    folder."""
    run = RunFolder(tmp_path)
    path = run.checkpoints / "step-00000003"
    path.mkdir(parents=True)
    run.recipe.touch()
    (path / ".metadata").touch()
    write_manifest(Checkpoint(path, 3, 1, None, record_files(path)), path)
    faults = Faults(run, INVOCATION, Ranks(0, 1, torch.device("cpu")), tiny())
    faults.when = "in step 4"

    def of(error):
        with pytest.raises(RunError) as caught, faults.explained():
            raise error
        return caught.value, str(caught.value).replace(str(tmp_path), "RUN")

    return of


KEPT = "the newest checkpoint is RUN/checkpoints/step-00000003"
GO_ON = "go on with: ac-recipes train tiny.yaml --nproc-per-node 2 --optimizer.lr 0.1 --json --resume RUN"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_plan_that_fits(told, error):
    raised, message = told(error)
    assert isinstance(raised, RankError)
    assert message.startswith(f"out of memory for this process ({MACHINE}), in step 4: ")
    plan, _, then = message.partition(f"; {KEPT}. Find what fits with: ")[2].partition("; then ")
    begins, _, budget = plan.rpartition(" ")
    assert begins == "ac-recipes plan tiny.yaml --optimizer.lr 0.1 --budget"
    assert then == GO_ON
    assert float(budget.removesuffix("GiB")) <= memory_limit(torch.device("cpu")) / 2**30


def test_out_of_memory_in_a_save_is_told_as_such_and_once(tiny, monkeypatch):
    def no_memory(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr(dcp, "save", no_memory)
    with pytest.raises(RankError) as caught:
        train(tiny(), "tiny", invocation=INVOCATION)
    assert str(caught.value).startswith(f"out of memory for this process ({MACHINE}), while the checkpoint of step 2 ")
    assert str(caught.value).count("ac-recipes plan") == 1


@pytest.mark.parametrize(
    ("error", "begins", "remedy"),
    [
        (OSError(errno.EIO, "Input/output error", "data.jsonl"), "data.jsonl: Input/output error, in step 4", "mended"),
        (FileNotFoundError(2, "No such file or directory", "a.png"), "a.png: No such file or directory, in", "mended"),
        (OSError(errno.ENOSPC, "No space left on device", "m.jsonl"), "m.jsonl: No space left on device, in", "room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded, in step 4", "room"),
        (OSError(errno.EFBIG, "File too large"), "File too large, in step 4", "Raise the limit on the size of a file"),
        (RuntimeError("write: File too large"), "write: File too large, in step 4", "Raise the limit on the size"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_named(told, error, begins, remedy):
    _, message = told(error)
    assert message.startswith(begins)
    assert KEPT in message
    assert remedy in message
    assert message.endswith(GO_ON)


def test_a_rank_that_lost_another_leaves_the_word_to_it(told):
    raised, message = told(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711"))
    assert isinstance(raised, LostPeerError)
    assert raised.kept == message.partition("says why on its node; ")[2].replace("RUN", raised.kept.rpartition(" ")[2])
    assert message == f"another rank has ended, in step 4, and says why on its node; {KEPT}; {GO_ON}"


def test_what_only_a_step_can_show_of_the_recipe_is_told(tiny):
    with pytest.raises(RankError, match=r"^distributed\.activation_checkpointing: save: 'router' matches no call of "):
        train(tiny("distributed.activation_checkpointing={policy: selective, save: [router, matmul]}"), "tiny")


def test_a_mistake_of_the_program_is_not_dressed_up(tiny, monkeypatch):
    monkeypatch.setattr(Trainer, "microbatches", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(), "tiny")


def test_a_loss_that_is_not_finite_names_what_is_kept_and_what_to_lower(tiny, monkeypatch):
    forward = Trainer.forward

    def spoilt(self, *arguments, **options):
        return forward(self, *arguments, **options) * (float("nan") if self.steps_done == 3 else 1.0)

    monkeypatch.setattr(Trainer, "forward", spoilt)
    with pytest.raises(RunError) as caught:
        train(tiny(), "tiny", invocation=INVOCATION)
    (run,) = Path(tiny().run.dir).iterdir()
    assert str(caught.value).replace(str(run), "RUN") == (
        f"the loss is nan at step 4; {KEPT}. Try a smaller optimizer.lr than 0.005 or a smaller "
        "clip_grad_norm.max_norm than 1; go on with: ac-recipes train tiny.yaml --nproc-per-node 2 --json "
        "--optimizer.lr 0.0005 --resume RUN "
        "(the checkpoint is of the step just before and may be spoilt already, its weights grown too large: if the run "
        "fails again, delete it, and --resume takes RUN/checkpoints/step-00000002)"
    )


def test_what_is_advised_against_a_loss_that_is_not_finite_is_not_so_yet_and_leads_elsewhere(tmp_path, tiny):
    def advised(*settings, step=1):
        recipe = tiny(*settings)
        faults = Faults(RunFolder(tmp_path), INVOCATION, Ranks(0, 1, torch.device("cpu")), recipe)
        return str(faults.explain(NotFiniteError("loss", float("inf"), step)))

    unclipped = advised("clip_grad_norm.max_norm=null")
    assert unclipped == (
        "the loss is inf at step 1; no checkpoint was written yet. Try a smaller optimizer.lr than 0.005, a longer "
        "lr_scheduler.lr_warmup_steps or gradients clipped, which are not (clip_grad_norm.max_norm 1.0); start the run "
        "anew"
    )
    path = tmp_path / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    (tmp_path / "recipe.yaml").touch()
    (path / ".metadata").touch()
    write_manifest(Checkpoint(path, 2, 1, None, record_files(path)), path)
    huge = advised("optimizer.lr=1e30", "lr_scheduler.min_lr=0.5e30", step=5)
    command, _, after = huge.partition(" (the checkpoint may be spoilt already")
    assert after.endswith("delete it, and start the run anew, as there is no earlier one)")
    assert "warmup" not in huge
    _, overrides = split_overrides(shlex.split(command.partition("--json ")[2].partition(" --resume")[0]))
    smaller = read_recipe(Recipe, tmp_path / "tiny.yaml", overrides)
    assert smaller.optimizer.lr == smaller.lr_scheduler.min_lr == 1e29


def test_faults_are_found_behind_what_torch_makes_of_them():
    hiding = RuntimeError("[enforce fail at inline_container.cc:672] . some other words")
    hiding.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert is_disk_full(hiding)
    assert is_disk_full(CheckpointException("save", {1: (hiding, None)}))
    assert is_disk_full(CheckpointException("save", {1: (RuntimeError("unexpected pos 704 vs 598"), None)}))
    assert is_out_of_memory(CheckpointException("save", {0: (MemoryError(), None)}))
    assert not is_disk_full(OSError(errno.EIO, "Input/output error"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(("limit", "file"), [(1, "recipe.yaml"), (2**12, "tokenizer.json")])
def test_a_disk_that_is_full_while_the_run_is_set_up_is_told(tiny, limit, file):
    """A real failure, of Python's own writing and of that of a library in Rust."""
    recipe, (soft, hard) = tiny(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RankError) as caught:
            train(recipe, "tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(
        rf".*/tiny-\d+-\d+/{file}: File too large, while the run was set up; no checkpoint was written yet\. Raise "
        r"the limit on the size of a file .*, and start the run anew",
        str(caught.value),
    )


def test_words_of_a_full_disk_are_known_whatever_raises_them(told):
    raised, message = told(type("RustError", (Exception,), {})("Io error: No space left on device (os error 28)"))
    assert isinstance(raised, RankError)
    assert message.startswith("Io error: No space left on device (os error 28), in step 4; ")


def test_without_its_recipe_no_run_is_said_to_go_on(told, tmp_path):
    (tmp_path / "recipe.yaml").unlink()
    _, message = told(OSError(errno.EIO, "Input/output error", "data.jsonl"))
    assert message.endswith(f"{KEPT}. Once it is mended, start the run anew")


def test_memory_that_is_really_not_there_is_told(tiny, monkeypatch):
    """The address space is limited to little more than the run has. The first batch needs tensors too large for what
    earlier tests have left free in the heap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    microbatches = Trainer.microbatches

    def limited(self):
        large = [{name: values.repeat(4096, 1) for name, values in batch.items()} for batch in microbatches(self)]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, hard))
        return large

    monkeypatch.setattr(Trainer, "microbatches", limited)
    sizes = ("step_scheduler.global_batch_size=58", "step_scheduler.local_batch_size=58")
    try:
        with pytest.raises(RankError) as caught:
            train(tiny(*sizes), "tiny", invocation=INVOCATION)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert re.match(r"out of memory for this process \(\d+\.\d GiB\), in step 1: .*allocate", str(caught.value))
    assert "; no checkpoint was written yet. Find what fits with: ac-recipes plan tiny.yaml" in str(caught.value)
