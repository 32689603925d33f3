"""Expert parallelism: this rank's part of the experts."""

from torch import nn

from ac_core.errors import ActivationCheckpointingError


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold all experts of a layer in 3-d parameters, `[num_experts, ...]`, as in transformers."""
    return [module for module in model.modules() if _stacked(module)]


def keep_part_of_experts(model: nn.Module, ep_size: int) -> None:
    """Leave each rank of `ep_size` its share of the experts of a model of fake tensors.

    The rows that a rank's experts are given stay as many as without: it sends `(ep_size - 1) / ep_size` of the rows of
    its own tokens to other ranks, and with uniform routing gets as many from them.

    Raises:
        ActivationCheckpointingError: the model has no experts, or not in such parameters, or another number of them.
    """
    found = expert_modules(model)
    if not found:
        raise ActivationCheckpointingError(
            f"ep_size: {type(model).__name__} has no module with its experts in parameters [num_experts, ...], so "
            "there is nothing to distribute; leave ep_size at 1"
        )
    for module in found:
        experts = module.num_experts
        if experts % ep_size:
            raise ActivationCheckpointingError(
                f"ep_size: {experts} experts cannot be shared evenly by {ep_size} ranks; choose a divisor of {experts}"
            )
        for name, parameter in _stacked(module):
            part = nn.Parameter(parameter.detach()[: experts // ep_size].clone(), parameter.requires_grad)
            setattr(module, name, part)
        module.num_experts = experts // ep_size


def _stacked(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    experts = getattr(module, "num_experts", None)
    if not isinstance(experts, int):
        return []
    own = list(module.named_parameters(recurse=False))
    stacked = [(name, p) for name, p in own if p.dim() >= 2 and p.shape[0] == experts]
    return stacked if any(p.dim() == 3 for _, p in stacked) else []
