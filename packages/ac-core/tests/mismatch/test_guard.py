"""A recompute that differs from its forward is an error that names the block, the call, the line and the cause.

Most blocks here run under torch's own checkpoint with the guard as its context function: what else ac-core does for a
block would put some of these causes right.
"""

import copy
import gc
import inspect
import pickle
import random
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from ac_core import (
    ActivationCheckpointingConfig,
    ActivationCheckpointingError,
    RecomputeMismatchError,
    apply_activation_checkpointing,
    check_recompute,
)
from ac_core.mismatch import diagnosis, guard
from ac_core.mismatch.guard import MismatchGuard
from ac_core.mismatch.recording import CommunicationRefusedError, Recording

WORLD = SimpleNamespace(cache=[], wide=False, threshold=0.0, autocast=False, fail=False)
"""What the blocks below depend on and nobody keeps for the recompute."""

NESTED = 2 if hasattr(torch.utils.checkpoint, "_NoopSaveInputs") else 1
"""Tensors that a checkpoint inside a block saves of its own: its input, in torch 2.11 a placeholder too."""

BY_LINEAR = "saved by torch.nn.functional.linear (AddmmBackward0)"
CONFIRMED = "; with that put back the recompute saves what the forward saved"


@pytest.fixture(autouse=True)
def fresh_world():
    vars(WORLD).update(cache=[], wide=False, threshold=0.0, autocast=False, fail=False)
    torch.manual_seed(0)
    random.seed(0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def mix(self, x):
        return self.down(self.up(x).sin())


class HiddenCache(Base):
    def forward(self, x):
        WORLD.cache.append(x.detach())
        keys = torch.cat(WORLD.cache)
        return (self.mix(x) @ self.mix(keys).t()).sum(-1)


class HeldCache(Base):
    def __init__(self):
        super().__init__()
        self.store = SimpleNamespace(keys=torch.zeros(0, 8))

    def forward(self, x):
        self.store.keys = torch.cat([self.store.keys, x.detach()])
        return (self.mix(x) @ self.mix(self.store.keys).t()).sum(-1)


class CacheArgument(Base):
    def forward(self, x, past):
        past.append(x.detach())
        return (self.mix(x) @ self.mix(torch.cat(past)).t()).sum(-1)


class PythonRandom(Base):
    def forward(self, x):
        x = self.mix(x)
        return x.cos() if random.random() < self.odds() else x

    def odds(self):
        return 0.9 if not WORLD.wide else 0.0


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        rows = int(torch.randint(1, 10_000, (), generator=self.generator))
        return self.mix(x.repeat(rows % 97 + 1, 1))


class Router(Base):
    def __init__(self):
        super().__init__()
        self.gate, self.top_k = nn.Linear(8, 4), 2

    def forward(self, x):
        weights, _ = self.gate(x).softmax(-1).topk(self.top_k, dim=-1)
        rows = torch.repeat_interleave(torch.arange(len(x)), self.top_k)
        return self.mix(x[rows]) * weights.reshape(-1, 1)


class Threshold(Base):
    def forward(self, x):
        chosen = (x[:, 0] > WORLD.threshold).nonzero().squeeze(-1)
        return self.mix(x[chosen])


class Branch(Base):
    def forward(self, x):
        if x.detach().sum() > WORLD.threshold:
            x = self.mix(x).tanh()
        return self.mix(x)


class Dropped(Base):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.mix(self.drop(self.mix(x)))


class Attends(Base):
    def forward(self, x):
        q = self.mix(x).reshape(1, 1, -1, 8)
        return F.scaled_dot_product_attention(q, q, q)


class NewTensor(Base):
    def forward(self, x):
        return self.mix(x.double().to(torch.ones(()).dtype))


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.mix(self.mix(x)) if self.calls % 2 else self.mix(x)


class Wide(Base):
    """Saves more where the world is wide."""

    def forward(self, x):
        x = self.mix(x)
        return self.mix(x) if WORLD.wide else x


class Fails(Base):
    def forward(self, x):
        if WORLD.fail:
            raise KeyError("nothing here")
        return self.mix(x)


class Casts(Base):
    def __init__(self):
        super().__init__()
        contexts = []

        def enter(*_):
            contexts.append(torch.autocast("cpu", torch.bfloat16, enabled=WORLD.autocast))
            contexts[-1].__enter__()

        def leave(*_):
            contexts.pop().__exit__(None, None, None)

        self.down.register_forward_pre_hook(enter)
        self.down.register_forward_hook(leave)

    def forward(self, x):
        return self.mix(x).sin()


def forward(block, *extra, rows=6, **options):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    guard = MismatchGuard(block, "layers.3")
    return checkpoint(block, x, *extra, use_reentrant=False, context_fn=guard, **options).sum()


def mismatch_of(loss):
    with pytest.raises(RecomputeMismatchError) as caught:
        loss.backward()
    assert isinstance(caught.value, ActivationCheckpointingError)
    assert caught.value.block == "layers.3"
    assert str(caught.value).startswith("block 'layers.3': its recompute saved other tensors than its forward did")
    return caught.value


def line_of(block, text):
    """The line of a block's class that holds a text, as the error shows it."""
    lines, first = inspect.getsourcelines(type(block))
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"at {inspect.getfile(type(block))}:{first + number} in "


@pytest.mark.parametrize("kind", [HeldCache, CacheArgument, HiddenCache])
def test_a_cache_that_grew(kind):
    block = kind()
    error = mismatch_of(forward(block, *([[]] if kind is CacheArgument else [])))
    assert error.cause == "cache"
    assert "forward:    float32 [6, 8] on cpu, saved by AddmmBackward0" in str(error)
    assert f"recompute:  float32 [12, 8] on cpu, {BY_LINEAR} in 'up'" in str(error)
    assert line_of(Base(), "self.up(x)") in str(error)
    seen = {HeldCache: "store.keys", CacheArgument: "an argument (list)", HiddenCache: "(6, 12, 18)"}[kind]
    assert seen in str(error)
    assert "use_cache=False" in str(error)


def test_a_branch_on_pythons_random_numbers():
    block = PythonRandom()
    loss = forward(block)
    WORLD.wide = True
    error = mismatch_of(loss)
    assert error.cause == "random"
    assert "Python's `random`" in str(error)
    assert error.index == 5
    assert "forward:    float32 [6, 8] on cpu, saved by CosBackward0" in str(error)
    assert "recompute:  none" in str(error)
    assert "before it:  float32 [16, 8] on cpu, saved by torch.nn.functional.linear" in str(error)


def test_numbers_from_a_generator_of_the_blocks_own():
    error = mismatch_of(forward(OwnGenerator()))
    assert error.cause == "random"
    assert "a generator of its own, generator" in str(error)


def test_routing_that_follows_a_changed_attribute():
    block = Router()
    loss = forward(block)
    block.top_k = 3
    error = mismatch_of(loss)
    assert error.cause == "attribute"
    assert f"top_k was 2 in the forward and is 3 now{CONFIRMED}" in str(error)
    # the run with the forward's value tells the forward's call and line as well
    assert str(error).count("saved by torch.Tensor.topk (TopkBackward0)") == 2
    assert str(error).count(line_of(block, "self.gate(x)")) >= 2
    assert block.top_k == 3


@pytest.mark.parametrize(
    ("kind", "cause", "op"), [(Threshold, "routing", "nonzero"), (Branch, "control flow", "_local_scalar_dense")]
)
def test_what_follows_from_values(kind, cause, op):
    block = kind()
    WORLD.threshold = -1000.0
    loss = forward(block)
    WORLD.threshold = 0.0 if kind is Threshold else 1000.0
    error = mismatch_of(loss)
    assert error.cause == cause
    assert f"aten::{op}" in str(error)
    assert line_of(block, "WORLD.threshold") in str(error)


def test_autocast_switched_by_a_hook():
    block = Casts()
    loss = forward(block)
    WORLD.autocast = True
    error = mismatch_of(loss)
    assert error.cause == "autocast"
    assert "the block is entered with autocast off and at this call it is on (bfloat16)" in str(error)
    assert "in 'down'" in str(error)


def test_eval_between_forward_and_backward():
    block = Dropped()
    loss = forward(block)
    block.eval()
    error = mismatch_of(loss)
    assert error.cause == "training"
    assert f"training was True in the forward and is False now, and so in 1 modules more{CONFIRMED}" in str(error)
    assert "torch.nn.functional.dropout" in str(error)
    assert not any(module.training for module in (block, block.drop))


def test_another_attention_backend():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    block = Attends()
    loss = forward(block)
    with sdpa_kernel(SDPBackend.MATH):
        error = mismatch_of(loss)
    assert error.cause == "sdpa"
    assert "the flash SDPA backend was True in the forward and is False now" in str(error)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_another_default_dtype():
    loss = forward(NewTensor())
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="dtype") as caught:
            loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    # here the recompute does not come as far as saving: the exception is torch's, and says where and what
    assert "block 'layers.3'" in caught.value.__notes__[0]
    assert "the default dtype was torch.float32 in the forward and is torch.float64 now" in caught.value.__notes__[0]


def test_an_attribute_that_the_block_changes_itself():
    block = Counting()
    error = mismatch_of(forward(block))
    assert error.cause == "attribute"
    assert f"every run of the block changes its attribute: calls was 0 in the forward and is 2 now{CONFIRMED}" in str(
        error
    )
    assert "make it a buffer" in str(error)


def test_fewer_tensors_than_the_forward():
    WORLD.wide = True
    block = Wide()
    loss = forward(block)
    WORLD.wide = False
    error = mismatch_of(loss)
    assert (error.cause, error.index) == ("unknown", 5)
    assert "first difference: saved tensor 6 (the forward saved 10)" in str(error)
    assert "forward:    float32 [6, 8] on cpu, saved by AddmmBackward0" in str(error)
    assert "recompute:  none" in str(error)
    assert f"before it:  float32 [16, 8] on cpu, {BY_LINEAR} in 'down'" in str(error)
    assert "check_recompute" in str(error)


def test_more_tensors_than_the_forward():
    block = Wide()
    loss = forward(block, early_stop=False)
    WORLD.wide = True
    error = mismatch_of(loss)
    assert error.index == 5
    assert "forward:    none" in str(error)
    assert f"recompute:  float32 [6, 8] on cpu, {BY_LINEAR} in 'up'" in str(error)
    assert line_of(Base(), "self.up(x)") in str(error)


def test_an_exception_that_only_the_recompute_raises():
    loss = forward(Fails())
    WORLD.fail = True
    with pytest.raises(KeyError, match="nothing here") as caught:
        loss.backward()
    assert caught.value.__notes__ == [
        "ac-core: raised while block 'layers.3' was recomputed in the backward; its forward had raised nothing"
    ]


def test_a_block_that_catches_the_end_of_the_recompute():
    class Catches(Base):
        def forward(self, x):
            try:
                return self.mix(x) ** 2
            except Exception:
                return self.mix(x)

    with pytest.raises(AssertionError) as caught:
        forward(Catches()).backward()
    assert "catches the exception by which torch ends a recompute" in caught.value.__notes__[0]


def test_a_checkpoint_inside_a_block():
    class Nested(Base):
        def __init__(self):
            super().__init__()
            self.inner = Dropped()

        def forward(self, x):
            return Wide.forward(self, checkpoint(self.inner, x, use_reentrant=False))

    loss = forward(Nested())
    WORLD.wide = True
    loss.backward()  # early stop: what comes after was never needed
    loss = forward(Nested())
    WORLD.wide = False
    error = mismatch_of(loss)
    assert error.index - NESTED == 5  # five tensors of `mix`


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_of_two_nested_blocks_the_one_that_differs_is_named(which):
    class Outer(Base):
        def __init__(self):
            super().__init__()
            self.inner = Dropped()

        def forward(self, x):
            guard = MismatchGuard(self.inner, "inner")
            return Wide.forward(self, checkpoint(self.inner, self.mix(x), use_reentrant=False, context_fn=guard))

    WORLD.wide = True
    outer = Outer()
    x = torch.randn(6, 8, requires_grad=True)
    loss = checkpoint(outer, x, use_reentrant=False, context_fn=MismatchGuard(outer, "outer")).sum()
    loss.backward(retain_graph=True)
    if which == "outer":
        WORLD.wide = False
    else:
        outer.inner.eval()
    with pytest.raises(RecomputeMismatchError) as caught:
        loss.backward()
    assert (caught.value.block, caught.value.index) == (which, 10 + NESTED if which == "outer" else 5)


def test_the_second_of_two_backwards():
    WORLD.wide = True
    loss = forward(Wide())
    loss.backward(retain_graph=True)
    WORLD.wide = False
    assert mismatch_of(loss).index == 5
    WORLD.wide = True
    loss.backward()


def test_a_backward_in_another_thread():
    block = Dropped()
    loss = forward(block)
    block.eval()
    caught = []

    def backward():
        try:
            loss.backward()
        except RecomputeMismatchError as error:
            caught.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert [error.cause for error in caught] == ["training"]


class Statistics(Wide):
    """Changes all kinds of state: what can be put back has to be after a diagnosis."""

    def __init__(self):
        super().__init__()
        self.norm, self.seen, self.calls = nn.BatchNorm1d(8), [], 0

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        random.random()
        return super().forward(F.dropout(self.norm(x)))

    def state(self):
        numbers = torch.get_rng_state().tolist(), random.getstate()
        return numbers, self.calls, list(self.seen), self.norm.running_mean.tolist()


def test_finding_the_cause_disturbs_nothing():
    def after_backward(wide):
        fresh = nn.Sequential(Statistics())
        apply_activation_checkpointing(fresh, blocks=Statistics)
        torch.manual_seed(0)
        random.seed(0)
        WORLD.wide = True
        loss = fresh(torch.randn(6, 8, requires_grad=True)).sum()
        WORLD.wide = wide
        if wide:
            loss.backward()
        else:
            with pytest.raises(RecomputeMismatchError):
                loss.backward()
        return fresh[0].state()

    assert after_backward(wide=False) == after_backward(wide=True)


def test_nothing_is_recorded_in_a_normal_step(stack, train_step, monkeypatch):
    calls = []
    monkeypatch.setattr(Recording, "__init__", lambda *_, **__: calls.append("recording"))
    monkeypatch.setattr(diagnosis, "describe_state", lambda *_: calls.append("state"))
    reads = []
    read = guard.PlainState.read
    monkeypatch.setattr(guard.PlainState, "read", lambda self: (reads.append(1), read(self))[1])
    model = stack(depth=4, dropout=0.1)
    apply_activation_checkpointing(model)
    for _ in range(3):
        train_step(model)
    assert calls == []
    assert len(reads) == 4 * 3  # one a block and forward, none in the recompute


def test_a_snapshot_keeps_no_tensor_alive():
    block = Base()
    block.loss, block.flag = 0.0, None
    guard = MismatchGuard(block, "layers.3")
    guard.plain.read()
    block.loss = block.flag = torch.zeros(3)
    alive = weakref.ref(block.loss)
    then = guard.plain.read()
    del block.flag, block.loss
    assert alive() is None
    assert "flag was a Tensor in the forward and is None now" in [str(change) for change in guard.plain.changes(then)]
    assert guard.plain.read() is not None  # an attribute that is gone is no error


def test_a_graph_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        frames = []
        block = Dropped()
        found = guard._frame_being_run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guard, "_frame_being_run", lambda: frames.append(weakref.ref(f := found())) or f)
            loss = forward(block)
            loss.backward()
            forward(block)
        del loss
        assert len(frames) == 2
        assert [frame() for frame in frames] == [None, None]
    finally:
        gc.enable()


def test_no_collective_is_repeated_by_one_rank_alone():
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Reduces(Wide):
        def forward(self, x):
            x = super().forward(x)
            distributed.all_reduce(x.detach().clone())
            reduced.append(1)
            return x.repeat(2 + self.training, 1).sin()

    reduced = []
    WORLD.wide = True
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        loss = forward(Reduces())
        WORLD.wide = False
        error = mismatch_of(loss)
        assert error.index == 5
        assert error.cause == "unknown"
        assert len(reduced) == 2  # the forward and the recompute, none of the runs that look for the cause
        block = Reduces()
        loss = forward(block)
        block.eval()
        assert mismatch_of(loss).cause == "training"  # which was seen, and could not be tried
        recording = Recording(block)
        with pytest.raises(CommunicationRefusedError, match="c10d.allreduce_"), recording.everything():
            distributed.all_reduce(block.up.weight.detach().clone())
    finally:
        distributed.destroy_process_group()


def test_the_parts_of_torch_that_this_rests_on_are_where_they_were():
    """When this fails, torch has moved them: see NOTE [ torch's checkpoint frame ]."""
    assert guard.TORCH_FRAME is not None
    assert issubclass(getattr(torch.utils.checkpoint, guard._STOP), Exception)
    found = []

    class Look:
        def __enter__(self):
            found.append(guard._frame_being_run())

        def __exit__(self, *_):
            return None

    checkpoint(Wide(), torch.randn(3, 8), use_reentrant=False, context_fn=lambda: (Look(), nullcontext()))
    assert type(found[0]) is guard.TORCH_FRAME
    assert guard._frame_being_run() is None


def test_a_model_that_is_traced_has_no_guards(stack):
    from torch.fx.experimental.proxy_tensor import make_fx

    model = stack(depth=2)
    apply_activation_checkpointing(model)
    ids = torch.arange(6)
    traced = make_fx(model)(ids)
    assert torch.equal(traced(ids), model(ids))


def test_where_torch_has_moved_them_its_own_error_comes_through(monkeypatch):
    monkeypatch.setattr(guard, "TORCH_FRAME", None)
    WORLD.wide = True
    loss = forward(Wide())
    WORLD.wide = False
    with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
        loss.backward()
    loss = forward(Wide(), early_stop=False)
    WORLD.wide = True
    with pytest.raises(CheckpointError) as caught:
        loss.backward()
    assert "block 'layers.3'" in caught.value.__notes__[0]


def test_where_torch_has_moved_them_values_cannot_be_checked(monkeypatch):
    monkeypatch.setattr(guard, "TORCH_FRAME", None)
    with check_recompute(), pytest.raises(ActivationCheckpointingError, match="'layers.3' cannot be checked: torch"):
        forward(Wide())


def test_a_context_that_cannot_be_entered_leaves_no_hooks():
    class Refuses:
        def __enter__(self):
            raise LookupError

        def __exit__(self, *_):
            return None

    guard = partial(MismatchGuard(Wide(), "layers.3"), lambda: (Refuses(), Refuses()))
    with check_recompute(), pytest.raises(LookupError):
        checkpoint(Wide(), torch.randn(2, 8), use_reentrant=False, context_fn=guard)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_failing_diagnosis_does_not_hide_the_mismatch(monkeypatch):
    def fail(_):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(guard, "diagnose", fail)
    WORLD.wide = True
    loss = forward(Wide())
    WORLD.wide = False
    error = mismatch_of(loss)
    assert "A different number of tensors was saved" in str(error)
    assert "a mistake of ours" in str(error)


def test_through_apply_with_other_contexts_and_buffers():
    class Buffered(Wide):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return super().forward(self.norm(x))

    class Counted:
        def __enter__(self):
            balance.append(1)

        def __exit__(self, *_):
            balance.append(-1)

    balance = []
    model = nn.Sequential(Buffered(), Buffered())
    apply_activation_checkpointing(model, blocks=Buffered, context_fn=lambda: (Counted(), Counted()))
    WORLD.wide = True
    loss = model(torch.randn(6, 8)).sum()
    statistics = model[1].norm.running_mean.clone()
    WORLD.wide = False
    with pytest.raises(RecomputeMismatchError, match="block '1'") as caught:
        loss.backward()
    assert caught.value.block == "1"
    assert sum(balance) == 0
    assert torch.equal(model[1].norm.running_mean, statistics)


def test_models_copy_and_pickle_with_their_guards(stack, assert_same_step):
    model = stack(depth=2)
    apply_activation_checkpointing(model)
    model(torch.arange(6)).sum().backward()  # the guards have looked at their blocks
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert_same_step(model, copied)
    assert_same_step(model, loaded)
    loss = copied(torch.arange(6)).sum()
    guard = copied.layers[0].forward._mismatch_guard
    then = guard.plain.read()
    model.layers[0].dropout.p = 0.9
    assert guard.plain.changes(then) == []
    copied.layers[0].dropout.p = 0.9
    assert [change.path for change in guard.plain.changes(then)] == ["dropout.p"]
    loss.backward()


def test_the_error_pickles():
    error = RecomputeMismatchError("message", block="b", index=3, cause="cache")
    loaded = pickle.loads(pickle.dumps(error))
    assert (str(loaded), loaded.block, loaded.index, loaded.cause) == ("message", "b", 3, "cache")


class Scaled(Base):
    """Other values, the same shapes."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return self.mix(self.mix(x) * self.scale)


def value_mismatch_of(loss):
    with pytest.raises(RecomputeMismatchError) as caught:
        loss.backward()
    assert str(caught.value).startswith("block 'layers.3': its recompute saved other values than its forward did")
    return caught.value


def test_other_values_of_the_same_shape():
    block = Scaled()
    loss = forward(block)
    block.scale = 2.0
    loss.backward()  # torch does not notice
    block.scale = 1.0
    with check_recompute():
        loss = forward(block)
    block.scale = 2.0
    error = value_mismatch_of(loss)
    assert error.cause == "attribute"
    assert f"scale was 1.0 in the forward and is 2.0 now{CONFIRMED}" in str(error)
    assert error.index == 5
    assert str(error).count(f"{BY_LINEAR} in 'up'") == 2
    assert str(error).count(line_of(Base(), "self.up(x)")) == 2
    assert "also seen" not in str(error)


def test_values_that_no_two_runs_share():
    class Unreplayed(Base):
        def forward(self, x):
            seed = random.SystemRandom().randrange(2**40)
            return self.mix(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))

    with check_recompute():
        loss = forward(Unreplayed())
    error = value_mismatch_of(loss)
    assert error.cause == "random"
    assert "two more recomputes differed from one another" in str(error)


@pytest.mark.parametrize("options", [{}, {"early_stop": False}])
def test_equal_values_pass_the_check_and_change_nothing(options, stack, assert_same_step):
    plain, model = stack(dropout=0.2), stack(dropout=0.2)
    apply_activation_checkpointing(model, ActivationCheckpointingConfig(**options))
    with check_recompute():
        assert_same_step(plain, model)


def test_the_check_knows_the_forwards_line_of_a_shape_too():
    block = Wide()
    WORLD.wide = True
    with check_recompute():
        loss = forward(block)
    WORLD.wide = False
    error = mismatch_of(loss)
    assert f"forward:    float32 [6, 8] on cpu, {BY_LINEAR} in 'up'" in str(error)


def test_the_environment_switch_takes_nought_and_one():
    assert [guard._switch(value) for value in ("1", "0", "", None)] == [True, False, False, False]
    with pytest.raises(ValueError, match="AC_CORE_CHECK_VALUES: 'yes' is not one of '0', '1'"):
        guard._switch("yes")
