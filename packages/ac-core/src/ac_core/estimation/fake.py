"""Tensors without values: a model and a batch of them, and what is assumed where a program asks for a value.

NOTE [ Values that are known ]
A fake tensor has a shape and no values, so it cannot follow a program that looks at some. Most of what programs look at
depends on the batch alone: token ids, masks, the grid of an image. So
1. integers and booleans that come from the caller's batch, from constants and from one another stay real tensors, and
   operations among them are carried out, as long as they are small. So do the few floating-point numbers that are made
   of them, such as places on a grid. Everything else is fake.
2. What a router decides is not among them: which expert gets which tokens depends on weights. Every expert is assumed
   to get the same number of rows. Where a router takes the best of all experts, it is told which those are
   (`ac_core.estimation.routing`), and what follows from that is known. Other ranks route as this one does.
3. Pixels are known where the caller gives them. Idefics, SmolVLM and their kin drop the images of which every pixel is
   0.0, the padding of a batch whose rows have different numbers of them. Such a comparison of what was given, or of
   views and casts of it, with a constant is carried out. Any other floating-point tensor is assumed to be nowhere equal
   to a constant: no image is padding.
4. While a model is being built, a function that draws its weights may look at what it has drawn. It sees zeros.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Nothing public makes tensors that have no values and yet a device on which every operation is allowed.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ac_core.errors import ActivationCheckpointingError
from ac_core.estimation.conversions import conversions_of_fakes
from ac_core.estimation.experts import expert_modules
from ac_core.estimation.given import follow, stand_in, values_of
from ac_core.estimation.routing import Routing

aten = torch.ops.aten
_MOST_VALUES = 2**22
"""Elements of a tensor whose values are worth having: larger ones take time and memory, and nobody looks at them."""

_MOST_PLACES = 2**16
"""The same for floating-point numbers that are made of integers: places, and not whole tables of angles or masks."""
_MOST_COMPARED = 2**28
"""Elements of a floating-point tensor whose comparison with a constant is answered: all pixels of a batch."""

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a program raises that looks at values which are not known."""


class KnownValues(TorchDispatchMode):
    """Carries out what is known and answers by an assumption what is not; see NOTE [ Values that are known ].

    Entered inside of the fake mode and outside of the meters.

    experts: how many share the rows that a router sends; 0: there are none. routing: to which of them they go. assumed:
    whether that had to be assumed of a loop. compared: whether it had to be assumed that floating-point numbers are no
    constant that they are compared with.
    """

    needs_every_operation = True  # see `ac_core.proof.meters`
    answers = frozenset({aten._grouped_mm.default})  # in every dtype, and not in bfloat16 alone as torch; ac_moe asks

    def __init__(self, experts: int = 0, routing: Routing | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.routing = routing or Routing()
        self.assumed = False
        self.compared = False
        self._building = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """A model is made inside of the context: what is drawn for its weights does not matter."""
        self._building = True
        try:
            yield
        finally:
            self._building = False

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return self._unknown(func, args, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return self._unknown(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        floats = bool(given) and not self._building
        if not floats and not all(map(_is_countable, given)):
            return func(*args, **kwargs)
        try:
            like = func(*args, **kwargs)  # on fake tensors: nothing else tells what comes out, and how large it is
        except NEEDS_VALUES:
            like = None
        if not all(_is_worth_knowing(leaf, floats=floats) for leaf in tree_leaves(like)):
            return like
        with unset_fake_temporarily():
            if func is _ALL_TO_ALL:
                args = (args[0], _from_ranks_alike(args[1], args[4]), *args[2:])
            return func(*args, **kwargs)

    def _unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _TAKE_INDICES:
            args = (args[0], [part for index in args[1] for part in _as_positions(index)], *args[2:])
        elif func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_mm(*args, **kwargs)
        elif func is aten.nonzero.default and self.experts:
            self.assumed = True
            return _chosen(args[0], self.experts)
        elif func is aten._local_scalar_dense.default and self._building:
            return args[0].dtype.is_floating_point and 0.0
        elif func in _EQUAL and not _is_countable(args[0]) and args[0].numel() <= _MOST_COMPARED:
            return self._compare(func, *args)
        elif func is aten.eq.Tensor and args[0] is args[1] and args[0].numel() <= _MOST_COMPARED:
            with unset_fake_temporarily():  # as `isfinite` asks: no number is assumed to be NaN, and none infinite
                return torch.ones(args[0].shape, dtype=torch.bool)
        result = func(*args, **kwargs)
        if func is aten.topk.default and 0 < self.experts == args[0].shape[-1] and result[1].numel() <= _MOST_VALUES:
            with unset_fake_temporarily():
                result = (result[0], self.routing.choose(result[1].shape, self.experts))
        follow(func, args, kwargs, result)
        return result

    def _compare(self, func: Any, floats: Tensor, constant: Any) -> Tensor:
        with unset_fake_temporarily():
            values = values_of(floats)
            if values is not None:
                return func(values, constant)
            self.compared = True
            return torch.full(floats.shape, _EQUAL[func], dtype=torch.bool)


_TAKE_INDICES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor)
_ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default
_EQUAL = {aten.eq.Scalar: False, aten.ne.Scalar: True}


def _from_ranks_alike(sent: Tensor, splits: list[int]) -> Tensor:
    """What an all-to-all brings, if every rank sends what this one, the first, does: from each what it sends itself.

    Torch's backend of ranks that are not there would return what this rank sends to others.
    """
    return torch.cat([sent[: splits[0]]] * len(splits)) if len(set(splits)) == 1 else sent


def _chosen(mask: Tensor, experts: int) -> Tensor:
    """Where a mask of a router's choice is true, if every expert gets as many rows as any other.

    Of one number an expert: everywhere, which a loop over the experts goes through. Else only how many places.
    """
    if mask.numel() in (experts, experts + 1):  # transformers has one more, for tokens that go nowhere
        with unset_fake_temporarily():
            places = torch.zeros(experts, mask.dim(), dtype=torch.long)
            places[:, max(range(mask.dim()), key=mask.size)] = torch.arange(experts)
            return places
    return mask.new_empty((max(1, mask.numel() // experts), mask.dim()), dtype=torch.long)


def _as_positions(index: Tensor | None) -> list[Tensor | None]:
    """An index by a mask of which the values are known, as indices by position: how many those are is then known."""
    if isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
        with unset_fake_temporarily():
            return list(index.nonzero().unbind(1))
    return [index]


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
    """What comes out of a grouped product. The fake kernel takes bfloat16 alone; the CPU's takes others as well."""
    groups = [] if (left.dim() == 3) != (right.dim() == 3) else [left.shape[0] if offs is None else offs.shape[0]]
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=options.get("out_dtype") or left.dtype)


def _is_countable(value: object) -> bool:
    """Integers, booleans, and what is no tensor."""
    return not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())


def _is_worth_knowing(value: object, *, floats: bool) -> bool:
    if not isinstance(value, Tensor):
        return True
    return value.numel() <= _MOST_VALUES if _is_countable(value) else floats and value.numel() <= _MOST_PLACES


def fake_mode() -> FakeTensorMode:
    """The mode in which a step is simulated."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    """A model of fake tensors on the CPU: what the factory builds, or a copy of a model, which is left as it is.

    To be called inside of the fake mode. With a `dtype`, floating-point parameters have that, and the factory runs with
    it as torch's default; buffers keep their own.

    Raises:
        TypeError: it is neither a module nor a factory of one, or a wrapper.
        ActivationCheckpointingError: it has tensors that cannot be made fake, or the factory wants a device that is not
            here.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(f"model: {type(model).__name__} is a wrapper; give the model in it, and strategy='ddp'")
    if isinstance(model, nn.Module):
        made = _copied(model)
    elif callable(model):
        made = _built(model, dtype)
    else:
        raise TypeError(f"model: {type(model).__name__} is neither a torch.nn.Module nor a function that builds one")
    if dtype is not None:
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return made


_NO_SUCH_DEVICE = re.compile(r"not linked with support for|not compiled with \w+ enabled|No \w+ GPUs|NVIDIA driver")
"""How torch says that a device is missing: with errors that have no class of their own."""


def _built(factory: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    default = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with conversions_of_fakes():
            made = factory()
    except (RuntimeError, AssertionError) as error:
        if not _NO_SUCH_DEVICE.search(str(error)):
            raise
        raise ActivationCheckpointingError(
            f"model: the function that builds it asks for a device that is not here ({error}); build it on the CPU, "
            "where it takes no memory: device= is what says whose kernels are assumed"
        ) from error
    finally:
        torch.set_default_dtype(default)
    if not isinstance(made, nn.Module):
        raise TypeError(f"model: the factory returned {type(made).__name__}, not a torch.nn.Module")
    tensors = [*made.parameters(), *made.buffers()]
    # The factory may have put them on the meta device, or given back a model that was there before.
    return _copied(made) if any(not isinstance(t, FakeTensor) or t.device.type != "cpu" for t in tensors) else made


def _copied(model: nn.Module) -> nn.Module:
    """A copy with fake tensors in the place of parameters, buffers and plain attributes; ties stay ties."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for value in tree_leaves(vars(module)):  # lists of tensors and the like, too
            if isinstance(value, Tensor) and id(value) not in fakes:
                fakes[id(value)] = _fake(value)
            elif isinstance(value, torch.Generator):
                with unset_fake_temporarily():
                    fakes[id(value)] = value.clone_state()
    try:
        return copy.deepcopy(model, fakes)
    except (TypeError, AssertionError, RuntimeError) as error:
        raise ActivationCheckpointingError(
            f"model: {type(model).__name__} cannot be copied ({error}); give a function that builds it, which is "
            "called with fake tensors on"
        ) from error


def _fake(tensor: Tensor) -> Tensor:
    has_values = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    if has_values and _is_countable(tensor) and _is_worth_knowing(tensor, floats=False):
        with unset_fake_temporarily():
            return tensor.detach().clone()
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise ActivationCheckpointingError(
            f"model: a {type(tensor).__name__} with layout {tensor.layout} cannot be simulated; give the plain model, "
            "as it is before FSDP2, tensor parallelism or quantisation change its tensors, or a function that builds it"
        )
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def fake_batch(batch: Any) -> Any:
    """A batch whose small integers and booleans are real and whose other tensors are fake; to be called inside of the
    fake mode. Mappings, lists and tuples are rebuilt, other values passed on."""
    if isinstance(batch, Tensor):
        made = _fake(batch)
        if isinstance(made, FakeTensor) and not isinstance(batch, FakeTensor) and not batch.is_meta:
            stand_in(made, batch)
        return made
    if isinstance(batch, Mapping):
        return {key: fake_batch(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(fake_batch, batch))
    return batch


def count_experts(model: nn.Module) -> int:
    """How many experts share the rows that a router sends; 0 if the model has none that says so."""
    if holders := expert_modules(model):
        return holders[0].num_experts
    configs = [getattr(module, "config", None) for module in model.modules()]
    counts = (getattr(holder, name, 0) for holder in (*model.modules(), *configs) for name in _EXPERTS)
    return max((count for count in counts if isinstance(count, int)), default=0)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
