"""What the command line says and how it exits, without any training."""

import json
import os
import subprocess
import sys

import pytest

from ac_recipes.cli import VERBS, main


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: VERB (see ac-recipes --help)"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "RECIPE: missing; give a file, the name of a shipped recipe, or --resume RUN"),
        (["train", "--resume"], "RECIPE: missing; give a file"),
        (["train", "--resume", "default"], "default is not the folder of a run (it holds no recipe.yaml); if it is"),
        (["estimate"], "the following arguments are required: RECIPE (see ac-recipes estimate --help)"),
        (["train", "defalt"], "defalt is neither a file nor a shipped recipe; shipped: default, "),
        (["train", "default", "--nproc-per-nod", "2"], "did you mean '--nproc-per-node'?"),
        (["train", "default", "--nproc-per-node", "0"], "--nproc-per-node: 0 is below 1"),
        (["train", "default", "--nproc-per-node", "two"], "invalid int value: 'two'"),
        (["train", "default", "qwen3-moe"], "unknown argument 'qwen3-moe'; a recipe is already given: default"),
        (["train", "default", "--device", "cpu"], "'--device'; it belongs to estimate and plan, and not to train"),
        (["train", "default", "optimizer.lr=1e-3"], "did you mean '--optimizer.lr'?"),
        (["train", "optimizer.lr=1e-3"], "optimizer.lr=1e-3 is no recipe; to override a field, write --optimizer.lr"),
        (["train", "default", "lr=1e-3"], "unknown argument 'lr=1e-3'; did you mean '--optimizer.lr'?"),
        (["train", "default", "-optimizer.lr", "1e-3"], "unknown argument '-optimizer.lr'; did you mean '--optim"),
        (["train", "default", "--epochs", "3"], "'--epochs'; did you mean '--step_scheduler.num_epochs'?"),
        (["train", "default", "--name", "x"], "did you mean '--peft.name' or '--dataset.name' or '--optimizer.name'"),
        (["train", "default", "--run.name", "x"], "or in 'wandb'; 'run' has 'dir'\n"),
        (["train", "default", "--optimizer", "{lr:1e-3}"], "field; YAML has a space after the colon: 'lr: 1e-3'"),
        (["train", "default", "--optimizer", "lr:1e-3"], "got 'lr:1e-3'; YAML has a space after the colon: 'lr: 1e"),
        (["train", "default", "--optimizer.learning_rate", "1"], "unknown field; did you mean 'lr'?"),
        (["train", "default", "--learning_rate", "1"], "did you mean '--optimizer.lr'?"),
        (["train", "default", "--distributed.gradient_checkpointing", "1"], "did you mean 'activation_checkpointing'?"),
        (["train", "default", "--distributed.activation_checkpointing", "budget"], "give {policy: budget, memory_"),
        (["train", "default", "--lr", "1e-4"], "unknown argument '--lr'; did you mean '--optimizer.lr'?"),
        (["train", "default", "--optimzer", "{lr: 1}"], "unknown argument '--optimzer'; did you mean '--optimizer'?"),
        (["train", "default", "--optimizer", "{lrr: 1}"], ":1:15: optimizer.lrr: unknown field; did you mean 'lr'?"),
        (["train", "default", "--optimizer={lr: 1"], "command line:1:15: optimizer: not valid YAML: "),
        (["train", "default", "--optimizer"], "1:15: optimizer: needs a value: --optimizer VALUE or --optimizer=VALUE"),
        (["train", "default", "--peft", "lora"], "line:1:15: peft: expected null or a mapping, got 'lora'"),
        (["doctor", "--run", "{dir: x}"], "doctor takes no recipe, and so no --run"),
        (["train", "default", "--dataset.text", "book.txt"], "got 'book.txt'; write a list: [book.txt]"),
        (["train", "default", "--nproc-per-node", "3"], "4 sequences cannot be shared evenly by 3 ranks"),
        (["train", "default", "--nproc-per-node", "2", "--dataset.text", "[gone.txt]"], "cannot read gone.txt"),
        (["train", "default", "--resume", "nowhere"], "nowhere is not the folder of a run"),
        (["train", "default", "--resume", ""], "--resume: RUN is empty, as an unset variable leaves it"),
        (["train", "default", "--resume="], "--resume: RUN is empty, as an unset variable leaves it"),
        (["check", "default", "--optimizer.lr"], "optimizer.lr: "),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["schema"], ""), (["schema"], "1"), (["check", "default"], ""), (["check", "no"], ""), (["train", "--help"], "")],
)
def test_where_nobody_reads_on_a_command_ends_in_silence(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ac_recipes", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False, timeout=60, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@FULL
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["schema"], ["check", "default"], ["check", "no", "--json"]], ids=" ".join)
def test_an_output_that_takes_no_more_is_one_line(arguments, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ac_recipes", *arguments],
            stdout=full, stderr=subprocess.PIPE, env=environment, check=False, timeout=60, text=True,
        )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "ac-recipes: standard output: No space left on device"
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(("closed", "arguments", "code"), [(">&-", "schema", 0), (">&- 2>&-", "check no", 2)])
def test_a_closed_output_is_none(closed, arguments, code):
    line = f'"{sys.executable}" -m ac_recipes {arguments} {closed}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=False, timeout=60, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_what_an_encoding_lacks_is_shown_as_its_escape():
    done = subprocess.run(
        [sys.executable, "-m", "ac_recipes", "check", "r\xfcns.yaml"],
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, b"")
    assert done.stdout.startswith(rb"r\xfcns.yaml is neither a file nor a shipped recipe; ")


def test_the_streams_of_a_program_that_calls_a_command_are_left_to_it():
    code = "import sys; from ac_recipes.cli import main; main(['schema']); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True)
    assert done.stdout.endswith("}\nstill here\n")


def test_a_command_that_ctrl_c_ends_says_nothing_of_runs(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ac_recipes.cli.check.run", interrupted)
    assert run(capsys, "check", "default") == (130, "", "ac-recipes: ended by SIGINT\n")


def test_another_full_disk_is_a_fault(tiny_file, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device", "some file")

    monkeypatch.setattr("ac_recipes.cli.check.run", fails)
    with pytest.raises(OSError, match="some file"):
        main(["check", str(tiny_file)])


def test_another_broken_pipe_is_a_fault(tiny_file, monkeypatch):
    def run(*_):
        raise BrokenPipeError("of some socket")

    monkeypatch.setattr("ac_recipes.cli.check.run", run)
    with open(os.devnull, "w") as sound, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", sound)
        patch.setattr(sys, "stderr", sound)
        with pytest.raises(BrokenPipeError, match="some socket"):
            main(["check", str(tiny_file)])


def test_a_recipe_that_is_not_there_has_no_place(capsys):
    code, out, _ = run(capsys, "check", "nofile.yaml")
    assert code == 2
    assert out.startswith("nofile.yaml is neither a file nor a shipped recipe; ")


def test_a_launcher_flag_between_overrides_is_honoured(capsys):
    code, _, err = run(capsys, "train", "--optimizer.lr", "1e-4", "--nproc-per-node", "3", "--rng.seed=1", "default")
    assert code == 2
    assert "by 3 ranks" in err


def test_the_flag_of_a_verb_wins_over_a_section_of_its_name(capsys, tiny_file, monkeypatch):
    seen = []
    monkeypatch.setattr("ac_recipes.cli.compare.run", lambda options, overrides, _: seen.append((options, overrides)))
    main(["compare", "--compile", str(tiny_file), "--compile={mode: max-autotune}", "--optimizer", "{lr: 1}"])
    ((options, overrides),) = seen
    assert (options.compile, options.recipe) == (True, str(tiny_file))
    assert [override.path for override in overrides] == ["compile", "optimizer"]


@pytest.mark.parametrize("verb", [[], ["train"], ["check"]])
def test_help_says_how_to_override(capsys, verb):
    with pytest.raises(SystemExit) as caught:
        main([*verb, "--help"])
    assert caught.value.code == 0
    assert "--section.field VALUE" in " ".join(capsys.readouterr().out.split())


def test_check_lists_every_mistake_of_every_recipe(capsys, tiny_file):
    bad = tiny_file.with_name("bad.yaml")
    bad.write_text(
        tiny_file.read_text().replace("activation_checkpointing: true", "activation_checkpointing: selctive")
        + "optimiser: {}\n"
    )
    code, out, err = run(capsys, "check", str(tiny_file), str(bad))
    assert (code, err) == (2, "")
    assert out.splitlines() == [
        f"{tiny_file}: no mistake found",
        f"{bad}:10:29: distributed.activation_checkpointing: expected true, false, null, one of 'none', 'full', "
        "'selective', 'budget', or a mapping; got 'selctive'; did you mean 'selective'?",
        f"{bad}:26:1: optimiser: unknown field; did you mean 'optimizer'?",
    ]


def test_check_as_json(capsys, tiny_file):
    assert json.loads(run(capsys, "check", str(tiny_file), "--json")[1]) == {"valid": True, "errors": []}
    code, out, _ = run(capsys, "check", str(tiny_file), "--json", "--optimizer.lrr", "1")
    assert code == 2
    assert json.loads(out) == {
        "valid": False,
        "errors": [
            {
                "file": "command line",
                "line": 1,
                "column": len(f"check {tiny_file} --json ") + 1,
                "path": "optimizer.lrr",
                "message": "unknown field",
                "suggestion": "lr",
            }
        ],
    }


def test_train_refuses_a_bad_recipe_before_anything_is_built(capsys, tiny_file, monkeypatch):
    monkeypatch.setattr("ac_recipes.cli.train._train", lambda *_: pytest.fail("training was started"))
    code, out, err = run(capsys, "train", str(tiny_file), "--distributed.activation_checkpointing", "selctive")
    assert (code, out) == (2, "")
    assert err.endswith("did you mean 'selective'?\n")


def test_train_as_json_prints_one_object(capsys, tiny_file):
    code, out, err = run(capsys, "train", str(tiny_file), "--json", "--step_scheduler.max_steps", "1")
    assert code == 0
    result = json.loads(out)
    assert result["steps"] == 1
    assert result["loss"] > 0
    assert "| mem " in err


LOADED = "sorted({'torch', 'transformers', 'megatron', 'rich'} & sys.modules.keys())"


QUICK = [*([verb, "--help"] for verb in VERBS), ["--help"], ["check", "default"], ["schema"]]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_and_check_load_no_large_library(arguments):
    code = f"""
import sys
from ac_recipes.cli import VERBS, main
try:
    main({arguments!r})
finally:
    print({LOADED}, file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stderr == "[]\n"
    assert run.stdout
