"""Each package imports only what it declares, and the three components neither import nor declare one another."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())
COMPONENTS = {"ac-core", "ac-loss", "ac-moe"}
IMPORT_NAMES = {"pyyaml": "yaml", "megatron-core": "megatron", "scikit-learn": "sklearn"}


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def required(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement).group().lower() for requirement in requirements}


def import_name(distribution: str) -> str:
    return IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def imported(package: Path) -> dict[str, set[str]]:
    """Top-level modules that the package's source imports anywhere, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.glob("src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path))
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_imports_are_declared(package):
    data = project(package)
    extras = data.get("optional-dependencies", {}).values()
    requirements = [*data["dependencies"], *(requirement for extra in extras for requirement in extra)]
    declared = {import_name(name) for name in required(requirements)}
    own = package.name.replace("-", "_")
    undeclared = {
        module: files
        for module, files in imported(package).items()
        if module not in declared | {own} | set(sys.stdlib_module_names)
    }
    assert undeclared == {}


@pytest.mark.parametrize("package", [p for p in PACKAGES if p.name in COMPONENTS], ids=lambda p: p.name)
def test_a_component_declares_no_sibling(package):
    data = project(package)
    extras = data.get("optional-dependencies", {}).values()
    everything = [*data["dependencies"], *(requirement for extra in extras for requirement in extra)]
    assert {name for name in required(everything) if name.startswith("ac-")} == set()


def test_there_are_four_packages_with_versions_of_their_own():
    assert {p.name for p in PACKAGES} == COMPONENTS | {"ac-recipes"}
    for package in PACKAGES:
        module = package / "src" / package.name.replace("-", "_")
        assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', (module / "__init__.py").read_text(), re.MULTILINE)
        assert (module / "py.typed").exists()
        assert (package / "CHANGELOG.md").exists()
        assert project(package)["dynamic"] == ["version"]
