"""The command beside a missing library is one that works where it is shown."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from ac_recipes import extras


@pytest.fixture
def origin(monkeypatch):
    """Sets what an installer has written down of where our packages came from."""

    def came_from(**written):
        class Distribution:
            def read_text(self, name):
                assert name == "direct_url.json"
                return json.dumps(written) if written else None

        monkeypatch.setattr(metadata, "distribution", lambda _: Distribution())

    return came_from


@pytest.fixture(autouse=True)
def with_pip(monkeypatch):
    monkeypatch.delenv("HATCH_ENV_ACTIVE", raising=False)
    monkeypatch.setattr(extras, "find_spec", lambda name: name)


def test_what_came_from_an_index_is_asked_of_the_index(origin):
    origin()
    assert extras.install_extra("peft") == "pip install 'ac-recipes[peft]'"
    origin(url="https://example.org/ac_recipes.whl", archive_info={})
    assert extras.install_extra("liger", "ac-loss") == "pip install 'ac-loss[liger]'"


def test_what_came_from_a_folder_is_installed_from_there(origin, tmp_path, monkeypatch):
    origin(url=(tmp_path / "a b" / "ac-recipes").as_uri(), dir_info={})
    assert extras.install_extra("peft") == f"pip install '{tmp_path}/a b/ac-recipes[peft]'"
    monkeypatch.chdir(tmp_path)
    origin(url=(tmp_path / "packages" / "ac-recipes").as_uri(), dir_info={"editable": True})
    assert extras.install_extra("peft") == "pip install -e './packages/ac-recipes[peft]'"


def test_where_there_is_no_pip_another_installer_is_named(origin, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert extras.install("matplotlib") == "uv pip install matplotlib"
    monkeypatch.setenv("HATCH_ENV_ACTIVE", "default")
    origin(url=(Path.cwd() / "packages" / "ac-recipes").as_uri(), dir_info={"editable": True})
    assert extras.install_extra("peft") == "hatch run uv pip install -e './packages/ac-recipes[peft]'"


def test_a_package_that_is_not_there_at_all_is_asked_of_the_index(monkeypatch):
    def distribution(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert extras.install_extra("peft") == "pip install 'ac-recipes[peft]'"
