"""Parameters under checkpointing: a recompute with other parameters than the forward's is an error.

Without checkpointing autograd notices a parameter that was edited between forward and backward by its version. A
recompute would silently use the edited one, or another one where `torch.func.functional_call` had put it in.
"""

from types import TracebackType

from torch import Tensor, nn

from ac_core.errors import ActivationCheckpointingError
from ac_core.region.walk import modules_of


class SameParameters:
    """A context function, `() -> (forward, recompute)`, for one block: the recompute raises
    `ActivationCheckpointingError` where a parameter is another tensor, or was written to, since the forward."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name

    def __call__(self) -> tuple["_Forward", "_Recompute"]:
        forward = _Forward(self.block)
        return forward, _Recompute(self, forward)


def _parameters(block: nn.Module) -> tuple[list[Tensor], list[int]]:
    parameters = [
        parameter
        for module in modules_of(block)
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    return parameters, [parameter._version for parameter in parameters]


class _Forward:
    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.parameters: list[Tensor] = []
        self.versions: list[int] = []

    def __enter__(self) -> None:
        self.parameters, self.versions = _parameters(self._block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class _Recompute:
    def __init__(self, same: SameParameters, forward: _Forward) -> None:
        self._same = same
        self._forward = forward

    def __enter__(self) -> None:
        parameters, versions = _parameters(self._same.block)
        if versions != self._forward.versions or any(
            now is not was for now, was in zip(parameters, self._forward.parameters, strict=True)
        ):
            self._refuse(parameters)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def _refuse(self, parameters: list[Tensor]) -> None:
        was = self._forward.parameters
        if len(parameters) != len(was):
            what = f"the parameters of block '{self._same.name}' are {len(parameters)} and were {len(was)} in"
        else:
            index = next(
                i
                for i, (p, before) in enumerate(zip(parameters, was, strict=True))
                if p is not before or p._version != self._forward.versions[i]
            )
            names = {id(p): name for name, p in self._same.block.named_parameters()}
            how = "is another tensor since" if parameters[index] is not was[index] else "was modified in place since"
            what = f"parameter '{names[id(parameters[index])]}' of block '{self._same.name}' {how}"
        raise ActivationCheckpointingError(
            f"{what} the forward, so the recompute would give gradients of another function; run backward before the "
            "optimizer's step, and inside the same torch.func.functional_call as the forward"
        )
