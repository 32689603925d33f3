import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ac_core import ActivationCheckpointingError
from ac_core.estimation import fake
from ac_core.estimation.fake import NEEDS_VALUES, KnownValues, count_experts, fake_batch, fake_mode, fake_model
from ac_core.estimation.ranks import simulated_ranks
from ac_core.estimation.routing import Routing


def test_integers_of_the_batch_keep_their_values_and_floats_do_not():
    with fake_mode(), KnownValues():
        batch = fake_batch({"ids": torch.tensor([[1, 2, 0]]), "pixels": [torch.ones(2)], "flag": True})
        ids, (pixels,) = batch["ids"], batch["pixels"]
        assert ids.tolist() == [[1, 2, 0]]
        assert int((ids != 0).sum() + torch.arange(3).sum()) == 5
        assert batch["flag"] is True
        assert isinstance(pixels, FakeTensor)
        assert isinstance(pixels[ids[0]], FakeTensor)
        with pytest.raises(NEEDS_VALUES):
            float(pixels.sum())


def test_a_mask_of_known_values_tells_how_many_it_chooses():
    mask = torch.tensor([True, False, True])
    with fake_mode(), KnownValues():
        mask, rows = fake_batch(mask), fake_batch(torch.randn(3, 4))
        assert rows[mask].shape == (2, 4)
        rows[mask] = torch.zeros(2, 4)
        assert torch.equal(mask, mask)


def test_large_integers_are_not_computed():
    with fake_mode(), KnownValues():
        assert isinstance(torch.arange(2**23), FakeTensor)


def real_images(pixels):
    """As Idefics and SmolVLM look for them."""
    real = (pixels == 0.0).sum(dim=(-1, -2, -3)) != pixels.shape[1:].numel()
    real[0] |= ~torch.any(real)
    return real


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_no_image_of_unknown_pixels_is_padding(device):
    given, known = torch.zeros(4, 3, 8, 8, device=device), KnownValues()
    with fake_mode(), known:
        pixels = fake_batch(given).to(torch.bfloat16)
        pixels = pixels if device == "meta" else pixels * 1.0  # computed: not what was given
        assert not known.compared
        real = real_images(pixels)
        assert pixels[real].shape == (4, 3, 8, 8)
        assert real.view(2, 2).sum(1).tolist() == [2, 2]
        assert bool((pixels != 0.0).all())
    assert known.compared


def test_padding_images_that_are_given_are_found():
    given = torch.rand(2, 2, 3, 8, 8) + 0.5
    given[1, 1] = 0.0
    known = KnownValues()
    with fake_mode(), known:
        pixels = fake_batch({"pixel_values": given})["pixel_values"]
        flat = pixels.to(torch.bfloat16).view(4, 3, 8, 8)
        assert isinstance(flat, FakeTensor)
        assert flat[real_images(flat)].shape == (3, 3, 8, 8)
        assert (flat != 0.0).flatten(1).all(1).tolist() == [True, True, True, False]
        joined = torch.cat([row.contiguous() for row in pixels.unbind(0)])
        assert real_images(joined).tolist() == [True, True, True, False]
        assert real_images(torch.stack([joined[3], joined[1]])).tolist() == [False, True]
        assert not known.compared
        assert real_images(torch.cat([joined[3:], torch.randn(1, 3, 8, 8)])).tolist() == [True, True]
    assert known.compared  # of random numbers nothing is known


@pytest.mark.parametrize("through", ["itself", "a view"])
def test_what_is_written_to_is_not_what_was_given(through):
    given, known = torch.zeros(2, 3, 4, 4), KnownValues()
    with fake_mode(), known:
        pixels = fake_batch(given)
        before = pixels.clone()
        (pixels if through == "itself" else pixels[0]).add_(1.0)
        assert real_images(before).tolist() == [True, False]  # one image is always left
        assert not known.compared
        assert real_images(pixels.flatten(2).view(2, 3, 4, 4)).tolist() == [True, True]
    assert known.compared


def test_so_many_pixels_are_not_compared(monkeypatch):
    monkeypatch.setattr(fake, "_MOST_COMPARED", 95)
    few, many = torch.ones(95), torch.ones(96)
    with fake_mode(), KnownValues():
        assert bool((fake_batch(few) != 0.0).all())
        with pytest.raises(NEEDS_VALUES):
            bool((fake_batch(many) != 0.0).all())


def test_integers_are_followed_through_floats():
    """As Qwen2-VL makes places of the grids of images."""
    with fake_mode(), KnownValues():
        places = (fake_batch(torch.arange(6)) * 0.5).long()
        assert places.tolist() == [0, 0, 1, 1, 2, 2]
        assert isinstance(torch.empty(3), FakeTensor)


def test_a_model_may_look_at_its_weights_while_it_is_built():
    known = KnownValues()
    with fake_mode(), known:
        with known.building():
            weight = nn.init.trunc_normal_(nn.Linear(64, 64).weight)
            offsets = nn.Parameter(torch.arange(3) * 0.5)
        assert isinstance(weight.data, FakeTensor)
        assert isinstance(offsets.data, FakeTensor)
        with pytest.raises(NEEDS_VALUES):
            nn.init.trunc_normal_(weight)


def by_the_best(scores):
    return scores.topk(2).indices


def by_sorting(scores):
    return scores.argsort(-1)[:, :2]


@pytest.mark.parametrize("choose", [by_the_best, by_sorting])
def test_a_router_is_assumed_to_be_uniform(choose):
    known = KnownValues(experts=4)
    with fake_mode(), known:
        mask = nn.functional.one_hot(choose(torch.randn(16, 4)), 4).permute(2, 1, 0)
        hit = (mask.sum((-1, -2)) > 0).nonzero()
        assert hit.flatten().tolist() == [0, 1, 2, 3]
        for (expert,) in hit:
            place, token = torch.where(mask[expert])
            assert place.shape == token.shape == (8,)
    assert known.assumed == (choose is by_sorting)


def test_where_a_router_sends_tokens_is_known_and_the_same_again():
    known = KnownValues(experts=4, routing=Routing(ranks=2, load=1.5))
    with fake_mode(), known:
        scores = torch.randn(16, 4)
        weights, chosen = scores.topk(2)
        assert isinstance(weights, FakeTensor)
        assert (chosen < 2).sum() == 24
        assert torch.equal(scores.topk(2).indices, chosen)
        assert isinstance(torch.randn(16, 5).topk(2).indices, FakeTensor)  # of something that is no expert


def test_other_ranks_send_what_this_one_sends_itself():
    with simulated_ranks(2), fake_mode(), KnownValues():
        mine = torch.tensor([[1, 2], [3, 4]])
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, [1, 1], [1, 1])
        assert theirs.tolist() == [[1, 2], [1, 2]]
        gathered = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(gathered, mine)
        assert [part.tolist() for part in gathered] == [mine.tolist()] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_any_dtype(dtype):
    with fake_mode(), KnownValues():
        left = torch.randn(16, 8, dtype=dtype, requires_grad=True)
        right = torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
        offsets = torch.arange(4, 20, 4, dtype=torch.int32)
        result = nn.functional.grouped_mm(left, right, offs=offsets)
        assert (result.shape, result.dtype) == ((16, 32), dtype)
        result.square().sum().backward()
        assert (left.grad.shape, right.grad.shape) == (left.shape, right.shape)


def test_ties_buffers_and_attributes_of_a_copied_model(decoder):
    model = decoder(tied=True)
    model.table = torch.ones(3)
    model.register_buffer("steps", torch.tensor(7))
    with fake_mode(), KnownValues():
        copied = fake_model(model, torch.bfloat16)
        assert copied.lm_head.weight is copied.embed.weight
        assert copied.embed.weight.dtype is torch.bfloat16
        assert isinstance(copied.table, FakeTensor)
        assert int(copied.steps) == 7
    assert model.embed.weight.dtype is torch.float32
    assert not isinstance(model.table, FakeTensor)


MISSING = "mps" if torch.cuda.is_available() else "cuda"
ELSEWHERE = {
    "moved": lambda: nn.Linear(2, 2).to(MISSING),
    "made": lambda: nn.Linear(2, 2, device=MISSING),
    "asked for": lambda: nn.Linear(2, 2).to(torch.cuda.current_device()),
}


@pytest.mark.parametrize("how", ELSEWHERE if MISSING == "cuda" else ["moved", "made"])
def test_a_factory_that_wants_a_device_that_is_not_here(how):
    says = r"^model: .* a device that is not here .* on the CPU, .*: device= "
    with fake_mode(), KnownValues(), pytest.raises(ActivationCheckpointingError, match=says):
        fake_model(ELSEWHERE[how], None)


def test_other_mistakes_of_a_factory_are_its_own():
    def build():
        raise RuntimeError("no such file")

    with fake_mode(), KnownValues(), pytest.raises(RuntimeError, match=r"^no such file$"):
        fake_model(build, None)


def test_tensors_that_cannot_be_made_fake_are_refused():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.eye(4).to_sparse())
    with fake_mode(), pytest.raises(ActivationCheckpointingError, match=r"^model: a Parameter with layout"):
        fake_model(model, None)


def test_experts_are_counted(decoder):
    model = decoder()
    assert count_experts(model) == 0
    model.num_experts = 8
    assert count_experts(model) == 8
