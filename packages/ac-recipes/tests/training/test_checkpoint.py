"""A checkpoint is whole or absent, and gives back every bit."""

import os
import shutil
import threading

import pytest
import torch
from torch import nn

from ac_core import apply_activation_checkpointing
from ac_recipes.training import retention
from ac_recipes.training.checkpoint import (
    RunState,
    found_checkpoints,
    load_checkpoint,
    save_alone,
    save_checkpoint,
    whole_checkpoints,
)
from ac_recipes.training.config import CheckpointConfig
from ac_recipes.training.manifest import MANIFEST, damage, record_files
from ac_recipes.training.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model):
    return RunState.of(model, torch.optim.AdamW(model.parameters()))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path):
    model, optimizer = build()
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, 2, RunState.of(model, optimizer), ALONE)
    train(model, optimizer, 3, first=2)
    return tmp_path, model


def test_training_goes_on_bit_for_bit(saved):
    folder, expected = saved
    model, optimizer = build()
    load_checkpoint(whole_checkpoints(folder)[-1], model, optimizer)
    train(model, optimizer, 3, first=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_saved_with_checkpointing_loaded_without(saved):
    folder, expected = saved
    model, optimizer = build()
    apply_activation_checkpointing(model)
    load_checkpoint(whole_checkpoints(folder)[-1], model, optimizer)
    train(model, optimizer, 3, first=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_only_whole_ones_are_listed_oldest_first(saved):
    folder, model = saved
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (10, 4):
        save_checkpoint(folder, step, RunState.of(model, optimizer), ALONE)
    assert [c.step for c in whole_checkpoints(folder)] == [2, 4, 10]
    (folder / "step-00000099.partial").mkdir()
    (folder / "step-00000098").mkdir()
    assert [c.step for c in whole_checkpoints(folder)] == [2, 4, 10]


def test_the_optimizers_settings_are_those_it_was_built_with(saved):
    folder, _ = saved
    model, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.6), weight_decay=0.7)
    load_checkpoint(whole_checkpoints(folder)[-1], model, optimizer)
    assert (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["weight_decay"]) == ((0.5, 0.6), 0.7)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "step 9", "step -1", 'step "7"', "step 7.0"])
def test_a_damaged_one_is_never_taken(saved, damage):
    folder, model = saved
    path = save_checkpoint(folder, 7, state_of(model), ALONE)
    largest = max(path.glob("*.distcp"), key=lambda f: f.stat().st_size)
    if damage == "truncate":
        os.truncate(largest, largest.stat().st_size - 1)
    elif damage == "delete":
        largest.unlink()
    elif damage.startswith("step "):
        manifest = (path / MANIFEST).read_text()
        (path / MANIFEST).write_text(manifest.replace('"step": 7', f'"step": {damage.removeprefix("step ")}'))
        assert f"{path / MANIFEST} is of step" in found_checkpoints(folder)[-1]
    else:
        (path / "manifest.json").write_text('{"step": 7, "files"')
    assert [c.step for c in whole_checkpoints(folder)] == [2]


@pytest.mark.parametrize("name", ["step-best", "step-00000002-keep", "step-0000000002", "step-2", "step-00000009.bak"])
def test_what_has_another_name_is_neither_taken_nor_deleted(saved, name):
    folder, model = saved
    shutil.copytree(folder / "step-00000002", folder / name)
    shutil.copytree(folder / "step-00000002", folder / "step-mine.partial")
    config = CheckpointConfig(keep_last=1)
    for step in (4, 100_000_000):
        save_checkpoint(folder, step, state_of(model), ALONE)
        assert [c.step for c in whole_checkpoints(folder)][-1] == step
        for checkpoint in retention.superseded(whole_checkpoints(folder), config):
            retention.remove(checkpoint)
    assert {path.name for path in folder.iterdir()} == {"step-100000000", name, "step-mine.partial"}


def test_a_copy_under_a_newer_step_is_told_as_damaged(saved):
    folder, _ = saved
    shutil.copytree(folder / "step-00000002", folder / "step-00000009")
    whole, told = found_checkpoints(folder)
    assert whole.step == 2
    assert told == f"{folder / 'step-00000009' / MANIFEST} is of step 2, which the folder's name is not"


def test_one_that_is_linked_to_is_taken_and_never_deleted(saved, tmp_path):
    folder, model = saved
    moved = (folder / "step-00000002").rename(tmp_path / "elsewhere")
    (folder / "step-00000002").symlink_to(moved)
    save_checkpoint(folder, 4, state_of(model), ALONE)
    first, second = whole_checkpoints(folder)
    assert (first.step, second.step) == (2, 4)
    retention.remove(first)
    assert damage(first) is None


def test_ranks_share_the_reading_and_one_of_them_finds_a_flipped_bit(saved):
    folder, _ = saved
    (checkpoint,) = whole_checkpoints(folder)
    shares = [record_files(checkpoint.path, share, 2) for share in range(2)]
    assert not shares[0].keys() & shares[1].keys()
    assert shares[0].keys() | shares[1].keys() == checkpoint.files.keys() | {MANIFEST}
    assert damage(checkpoint) is None
    for name in checkpoint.files:
        file = checkpoint.path / name
        data = file.read_bytes()
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        (found,) = [told for share in range(2) if (told := damage(checkpoint, share, 2)) is not None]
        assert found == f"{file} is not what was written: its checksum differs from the manifest's"
        file.write_bytes(data)


def test_leftovers_of_a_killed_save_are_replaced(saved):
    folder, model = saved
    partial = folder / "step-00000003.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    save_checkpoint(folder, 3, state_of(model), ALONE)
    assert not partial.exists()
    assert [c.step for c in whole_checkpoints(folder)] == [2, 3]


def test_a_save_that_fails_leaves_the_older_ones(saved, monkeypatch):
    folder, model = saved

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(folder, 9, state_of(model), ALONE)
    assert [c.step for c in whole_checkpoints(folder)] == [2]


def test_of_two_that_save_alone_one_writes_and_the_other_waits_for_it(saved, monkeypatch):
    folder, model = saved
    writing, go_on, returned = threading.Event(), threading.Event(), []
    save = torch.distributed.checkpoint.save

    def slow(*args, **kwargs):
        writing.set()
        assert go_on.wait(20)
        return save(*args, **kwargs)

    monkeypatch.setattr("torch.distributed.checkpoint.save", slow)
    threads = [
        threading.Thread(target=lambda: returned.append(save_alone(folder, 7, state_of(model), ALONE.device)))
        for _ in range(2)
    ]
    threads[0].start()
    assert writing.wait(20)
    monkeypatch.setattr("torch.distributed.checkpoint.save", None)  # the second is not to call it
    threads[1].start()
    threads[1].join(0.3)
    assert returned == []
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [path.name for path in returned] == ["step-00000007"] * 2
    assert [(c.step, damage(c)) for c in whole_checkpoints(folder)] == [(2, None), (7, None)]
    assert list(folder.glob("*.partial")) == []
    assert save_alone(folder, 7, state_of(model), ALONE.device) == returned[0], "there already: nothing is written"


def test_one_that_fails_to_save_alone_leaves_nothing_and_the_next_may(saved, monkeypatch):
    folder, model = saved

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("torch.distributed.checkpoint.save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_alone(folder, 9, state_of(model), ALONE.device)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    save_alone(folder, 9, state_of(model), ALONE.device)
    assert [c.step for c in whole_checkpoints(folder)] == [2, 9]
