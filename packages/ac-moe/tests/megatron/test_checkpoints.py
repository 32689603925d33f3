"""What is seen of Megatron's checkpoint, by whom, and what is left afterwards."""

import threading
from unittest import mock

import pytest
import torch
from ac_moe_megatron import HIDDEN, block, config, megatron_on_cpu, run
from ac_moe_ranks import Ranks

import ac_moe


def seen(rank: int) -> None:
    with megatron_on_cpu():
        from megatron.core import tensor_parallel

        from ac_moe.megatron.checkpoints import checkpoints_seen

        original, log = tensor_parallel.checkpoint, []

        def wrap(name: str) -> object:
            return lambda function: log.append(name) or function

        def checkpoint() -> None:
            tensor_parallel.checkpoint(lambda x: x * 2, False, torch.ones(1, requires_grad=True)).sum().backward()

        checkpoint()
        with checkpoints_seen(wrap("outer")) as outer:
            checkpoint()
            with checkpoints_seen(wrap("inner")):
                checkpoint()
            checkpoint()
            assert tensor_parallel.checkpoint is not original
            thread = threading.Thread(target=checkpoint)  # has no wish of its own: not seen
            thread.start()
            thread.join()
        assert (log, outer.seen) == (["outer", "inner", "outer"], 2)
        assert tensor_parallel.checkpoint is original

        with pytest.raises(KeyError), checkpoints_seen(wrap("never")):
            raise KeyError
        assert tensor_parallel.checkpoint is original

        # The first to enter may be the first to leave.
        one, two = checkpoints_seen(wrap("one")), checkpoints_seen(wrap("two"))
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)
        assert tensor_parallel.checkpoint is not original
        checkpoint()
        two.__exit__(None, None, None)
        assert log[-1] == "two"
        assert tensor_parallel.checkpoint is original


def test_seen_for_the_time_of_one_call_on_one_thread(ranks: Ranks) -> None:
    ranks.run(seen)


def while_it_runs(rank: int) -> list[bool]:
    """Whether the attribute is Megatron's: in the forward, in the recompute, after an error, afterwards."""
    with megatron_on_cpu():
        from megatron.core import tensor_parallel

        original, answers = tensor_parallel.checkpoint, []
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine")
        hook = model.layers[1].self_attention.register_forward_pre_hook(
            lambda *_: answers.append(tensor_parallel.checkpoint is original)
        )
        run(model, "f0 b0")
        hook.remove()
        with mock.patch.object(model.layers[1].mlp.experts, "weight1", None), pytest.raises(AttributeError):
            run(model, "f0 b0")
        return [*answers, tensor_parallel.checkpoint is original]


def test_nothing_is_left_in_megatron(ranks: Ranks) -> None:
    # The recompute needs nothing of it: it calls the function that was wrapped in the forward.
    assert ranks.run(while_it_runs) == [[False, True, True]] * 2


def not_seen(rank: int) -> str:
    with megatron_on_cpu():
        model = block(config("uniform 1"))
        ac_moe.megatron.enable(model, "combine")
        x = torch.randn(6, 1, HIDDEN).requires_grad_()
        otherwise = property(lambda _: lambda x, **__: x)
        with mock.patch.object(type(model.forward), "original", otherwise):
            with pytest.raises(RuntimeError) as caught:
                model(x, attention_mask=None)
            model.eval()(x, attention_mask=None)  # does not checkpoint, and need not
        return str(caught.value)


def test_a_checkpoint_that_is_not_seen_is_an_error(ranks: Ranks) -> None:
    assert ranks.run(not_seen)[0].startswith(
        "TransformerBlock: recompute_granularity='full', but no call of Megatron's checkpoint was seen"
    )


def another_signature(rank: int) -> str:
    with megatron_on_cpu():
        from megatron.core import tensor_parallel

        model = block(config("uniform 1"))
        other = mock.create_autospec(lambda region, *tensors: None)
        with mock.patch.object(tensor_parallel, "checkpoint", other), pytest.raises(ImportError) as caught:
            ac_moe.megatron.enable(model, "combine")
        return str(caught.value)


def test_another_signature_is_refused(ranks: Ranks) -> None:
    assert "here it is ['region', 'tensors']" in ranks.run(another_signature)[0]
