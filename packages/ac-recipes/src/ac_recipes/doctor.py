"""What of ac-recipes works on this machine: the libraries, whether they load, and what torch finds here.

Which library is needed, in which versions and by which extra is read from the metadata of the installed packages, so
that there is one place that says it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from io import StringIO
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ac_recipes.extras import install, install_extra
from ac_recipes.pretrained import CARRIERS, PACKAGE
from ac_recipes.shipped import SHIPPED, shipped_names

OURS = ("ac-core", "ac-loss", "ac-moe", "ac-recipes")
PYTHON = ">=3.11"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at.

    status: `ok`; `missing`; `outdated`, a version out of range; `broken`, installed and does not load; `note`, not a
        fault, but good to know.
    says: what it is for, or what is wrong.
    remedy: the command that mends it.
    """

    name: str
    status: Literal["ok", "missing", "outdated", "broken", "note"]
    version: str | None = None
    says: str = ""
    remedy: str | None = None


class Library(NamedTuple):
    """A library by distribution name, the module it is imported as, and what it is for."""

    name: str
    module: str
    purpose: str
    on_gpu_only: bool = False
    install: str | None = None  # where it is on no index
    extra: str | None = None  # of ac-recipes, where another of our packages has it in an extra as well


LIBRARIES = (
    Library("torch", "torch", ""),
    Library("transformers", "transformers", "the models"),
    Library("tokenizers", "tokenizers", "the tokenizers"),
    Library("pyyaml", "yaml", "recipes"),
    Library("rich", "rich", "tables and progress"),
    Library("megatron-core", "megatron.core", "ac-moe in Megatron's own layers"),
    Library("megatron-fsdp", "megatron_fsdp", "distributed.strategy megatron_fsdp", on_gpu_only=True),
    Library(
        "deep-ep",
        "deep_ep",
        "model.backend.dispatcher hybridep",
        on_gpu_only=True,
        install="build the hybrid-ep branch of https://github.com/deepseek-ai/DeepEP",
    ),
    Library("triton", "triton", "loss_fn.backend triton", on_gpu_only=True),
    Library("liger-kernel", "liger_kernel", "loss_fn.backend liger", on_gpu_only=True),
    Library("cut-cross-entropy", "cut_cross_entropy", "loss_fn.backend cce", on_gpu_only=True),
    Library("peft", "peft", "LoRA"),
    Library("gguf", "gguf", "weights from .gguf files"),
    Library("accelerate", "accelerate", "weights from .gguf files", extra="gguf"),
    Library("scikit-learn", "sklearn", "dataset.kind digits"),
    Library("datasets", "datasets", "data sets of the Hugging Face hub"),
    Library("tensorboard", "tensorboard", "curves in TensorBoard"),
    Library("wandb", "wandb", "curves in Weights & Biases"),
)


class Wanted(NamedTuple):
    """What the installed packages say of a library: the versions they take, and what to install to get it."""

    versions: SpecifierSet
    install: str
    required: bool


def examine() -> list[Finding]:
    """Look at everything; nothing is installed or changed."""
    found = [_python(), *(_package(name) for name in OURS)]
    torch_loads = _why_it_does_not_load("torch") is None
    on_gpu = torch_loads and import_module("torch").cuda.is_available()
    found += [_library(library, wanted(library), on_gpu=on_gpu) for library in LIBRARIES]
    found += [_carrier(name) for name in CARRIERS]
    return found + (list(_torch()) if torch_loads else [])


def wanted(library: Library) -> Wanted:
    """What our packages' metadata says of the library; a requirement beats an extra."""
    versions, required = SpecifierSet(), False
    extra = (library.extra, "ac-recipes") if library.extra else None
    for package in OURS:
        for requirement in map(Requirement, _requires(package)):
            if canonicalize_name(requirement.name) != library.name:
                continue
            in_extra = _extra_of(requirement)
            versions &= requirement.specifier
            required |= in_extra is None
            # An extra named after the library brings nothing else; `examples` would.
            if in_extra and (extra is None or in_extra == library.name):
                extra = in_extra, package
    command = install(f"'{library.name}{versions}'") if required or extra is None else install_extra(*extra)
    return Wanted(versions, library.install or command, required)


def _requires(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _extra_of(requirement: Requirement) -> str | None:
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return None
    return str(requirement.marker).rpartition("extra == ")[2].strip("\"'") or None


def _python() -> Finding:
    number = ".".join(map(str, sys.version_info[:3]))
    if number in SpecifierSet(PYTHON):
        return Finding(name="python", status="ok", version=number)
    return Finding(name="python", status="outdated", version=number, says=f"needs python{PYTHON}")


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, status="ok", version=version(name))
    except PackageNotFoundError:
        return Finding(name=name, status="missing", remedy=f"{install(f'./packages/{name}')}  (in a checkout)")


def _library(library: Library, want: Wanted, *, on_gpu: bool) -> Finding:
    try:
        number = version(library.name)
    except PackageNotFoundError:
        needs = "needed" if want.required else "optional"
        if library.on_gpu_only and not on_gpu:
            says = f"{library.purpose} ({needs}; of use on NVIDIA GPUs only)"
            return Finding(name=library.name, status="note", says=says, remedy=want.install)
        says = f"{library.purpose} ({needs})".strip()
        return Finding(name=library.name, status="missing", says=says, remedy=want.install)
    if not want.versions.contains(number, prereleases=True):
        says = f"{library.purpose}: version {number} is not in {want.versions}".removeprefix(": ")
        return Finding(name=library.name, status="outdated", version=number, says=says, remedy=want.install)
    reason = _why_it_does_not_load(library.module)
    if reason:
        return Finding(
            name=library.name,
            status="note" if library.on_gpu_only and not on_gpu else "broken",
            version=number,
            says=f"{library.purpose}: is installed and does not load here: {reason}".removeprefix(": "),
            remedy=None if library.on_gpu_only and not on_gpu else f"{want.install} --force-reinstall",
        )
    return Finding(name=library.name, status="ok", version=number, says=library.purpose)


def _carrier(name: str) -> Finding:
    """A package with weights or data of shipped recipes."""
    texts = {recipe: (SHIPPED / f"{recipe}.yaml").read_text(encoding="utf-8") for recipe in shipped_names()}
    says = f"for {', '.join(recipe for recipe, text in texts.items() if f'{PACKAGE}{name}/' in text)}"
    try:
        return Finding(name=name, status="ok", version=version(name), says=says)
    except PackageNotFoundError:
        return Finding(name=name, status="missing", says=f"{says} (optional)", remedy=install(*CARRIERS[name]))


def _why_it_does_not_load(module: str) -> str | None:
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
            import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what there is to say
        said = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return None


def _torch() -> Iterator[Finding]:
    import torch

    built = torch.version.cuda
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if gpus and torch.cuda.is_available():
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
        yield Finding(name="cuda", status="ok", version=built, says=names)
    elif built is None:
        yield Finding(
            name="cuda",
            status="note",
            says="this torch is built for CPUs: runs use the CPU and gloo",
            remedy="with an NVIDIA GPU: the command for it at https://pytorch.org/get-started/locally",
        )
    else:
        yield Finding(
            name="cuda",
            status="note",
            version=built,
            says="no GPU is seen (nvidia-smi and CUDA_VISIBLE_DEVICES tell why): runs use the CPU and gloo",
        )
    yield _gloo()
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        number = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(name="nccl", status="ok", version=number, says="ranks on GPUs")
    else:
        yield Finding(name="nccl", status="note", says="not in this torch; several GPUs need it")


def _gloo() -> Finding:
    """Really starts a group of one: a host whose name does not resolve has gloo and cannot use it."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        return Finding(name="gloo", status="missing", says="not in this torch; several ranks on CPUs need it")
    if distributed.is_initialized():
        return Finding(name="gloo", status="ok", says="ranks on CPUs")
    try:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        distributed.all_reduce(torch.ones(1))
    except Exception as error:  # noqa: BLE001 - torch raises several
        reason = " ".join(str(error).split())[:200]
        remedy = "export GLOO_SOCKET_IFNAME=lo  (ranks on this machine only)"
        return Finding(name="gloo", status="broken", says=reason, remedy=remedy)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return Finding(name="gloo", status="ok", says="ranks on CPUs")
