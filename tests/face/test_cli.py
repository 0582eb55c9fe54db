from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdsl.cli import main
from tests.face.jobs import SPEC as JOB
from tests.tree import ROOT

MODEL_ARGUMENTS = "layers = 2; width = 16; heads = 2; context = 8"
SPEC = f"{JOB}profile large {{ train.batch = 8 }}\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, cache):
    """A folder of its own to work in, with a spec; facts of models are cached for all tests of this file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDSL_CACHE", str(cache))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    (tmp_path / "job.pdsl").write_text(SPEC)
    return tmp_path


def command(*argv, **kwargs):
    return subprocess.run([sys.executable, "-m", "pdsl", *argv], capture_output=True, text=True, timeout=100, check=False, **kwargs)


# --- check ----------------------------------------------------------------------------------------------------------------------------------


def test_a_clean_spec_ends_with_0(capsys):
    assert main(["check", "job.pdsl"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "error" not in out
    assert "warning" not in out


def test_errors_go_to_stdout_and_end_with_1(folder, capsys):
    (folder / "bad.pdsl").write_text(SPEC.replace("microbatches = 2", "microbatches = 1").replace("steps = 6", "stepz = 6"))
    assert main(["check", "bad.pdsl", "--no-model", "--format", "concise"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 errors and 1 note in 1 file"
    codes = sorted(line.split("[")[1][:6] for line in lines[:-1])
    assert codes == ["PDL101", "PDL402", "PDL900"]


def test_several_files_are_told_of_together(folder, capsys):
    (folder / "bad.pdsl").write_text("pdsl 1\nmesh {\n")
    assert main(["check", "--no-model", "job.pdsl", "bad.pdsl"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("in 2 files")


def test_standard_input_has_the_name_it_is_given(monkeypatch, capsys):
    class Input:
        buffer = io.BytesIO(b"pdsl 1\nmesh { axis pp = }\n")

    monkeypatch.setattr(sys, "stdin", Input)
    assert main(["check", "-", "--stdin-filename", "editor.pdsl", "--no-model", "--format", "concise"]) == 1
    assert capsys.readouterr().out.startswith("editor.pdsl:2:18: error[PDL001]")


def test_json_has_the_findings_and_the_files(capsys):
    assert main(["check", "job.pdsl", "--no-model", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["files"]) == (True, ["job.pdsl"])
    assert [d["code"] for d in found["diagnostics"]] == ["PDL900"]


@pytest.mark.parametrize("form", ["full", "concise", "json", "github", "sarif", "junit"])
def test_every_format_tells_of_an_error(form, folder, capsys):
    (folder / "bad.pdsl").write_text(SPEC.replace("microbatches = 2", "microbatches = 1"))
    assert main(["check", "bad.pdsl", "--no-model", "--format", form]) == 1
    assert "PDL402" in capsys.readouterr().out


def test_warnings_fail_only_where_asked(folder, capsys):
    (folder / "warned.pdsl").write_text(SPEC + "param unused: int = 1\n")
    assert main(["check", "warned.pdsl", "--no-model"]) == 0
    assert main(["check", "warned.pdsl", "--no-model", "--fail-on", "warning"]) == 1
    assert "warning[PDL103]" in capsys.readouterr().out


def test_set_profile_and_world_reach_the_spec(capsys):
    assert main(["check", "job.pdsl", "--no-model", "--set", "train.batch=3"]) == 1
    assert "PDL404" in capsys.readouterr().out
    assert main(["check", "job.pdsl", "--no-model", "--profile", "small"]) == 1
    assert "unknown profile small" in capsys.readouterr().out
    assert main(["check", "job.pdsl", "--no-model", "--world", "3"]) == 1
    assert "PDL201" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "told"), [("none.pdsl", "none.pdsl cannot be read: No such file or directory"), (".", "cannot be read: Is a directory")]
)
def test_a_file_that_cannot_be_read_is_a_bad_invocation(name, told, capsys):
    assert main(["check", name]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_no_text_is_a_bad_invocation(folder, capsys):
    (folder / "binary.pdsl").write_bytes(b"pdsl 1\n\xff\xfe")
    assert main(["check", "binary.pdsl"]) == 2
    assert capsys.readouterr().err == "pdsl: binary.pdsl is not UTF-8 text: byte 0xff at offset 7\n"


def test_one_unreadable_file_does_not_hide_what_is_wrong_with_the_others(folder, capsys):
    (folder / "typo.pdsl").write_text(SPEC.replace("steps", "step"))
    assert main(["check", "--no-model", "none.pdsl", "typo.pdsl", "."]) == 2
    out, err = capsys.readouterr()
    assert "train has no key step" in out
    assert err.splitlines() == ["pdsl: none.pdsl cannot be read: No such file or directory", "pdsl: . cannot be read: Is a directory"]


def test_a_byte_order_mark_is_no_error(folder, capsys):
    (folder / "marked.pdsl").write_bytes(b"\xef\xbb\xbf" + SPEC.encode())
    assert main(["check", "marked.pdsl", "--no-model"]) == 0


# --- the model and the data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "code", "told"),
    [
        ("models:gpt", "models:gtp", "PDL108", "did you mean gpt"),
        ("pdsl.models:gpt", "no_such_module:gpt", "PDL108", "no_such_module"),
        ("width = 16", "widht = 16", "PDL108", "did you mean width"),
        ("heads = 2", "heads = 3", "PDL108", "width 16 is not a multiple of heads 3"),
        ("data:python_source", "data:python_sauce", "PDL802", "did you mean python_source"),
        ('python_source", context = 8', 'python_source", context = 0', "PDL802", "a row has at least one token"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_model_or_data_is_one_finding(old, new, code, told, folder, capsys):
    (folder / "bad.pdsl").write_text(SPEC.replace(old, new))
    assert main(["check", "bad.pdsl", "--format", "concise"]) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if "error[" in line]
    assert len(errors) == 1
    assert f"error[{code}]" in errors[0]
    assert told in errors[0]
    assert errors[0].startswith("bad.pdsl:3:7: " if code == "PDL108" else "bad.pdsl:7:10: ")


def test_rules_on_parameters_apply_once_the_model_is_read(folder, capsys):
    (folder / "bad.pdsl").write_text(SPEC.replace('"**" =>', '"layers.*.attn.wx.weight" =>'))
    assert main(["check", "bad.pdsl", "--format", "concise"]) == 1
    out = capsys.readouterr().out
    assert "PDL301" in out
    assert "PDL302" in out


def test_a_model_beside_the_spec_is_found(folder, capsys):
    (folder / "beside.py").write_text(
        "from torch import nn\ndef build(width):\n    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))\n"
    )
    (folder / "rows.py").write_text(
        "import torch\nclass Rows:\n    def __len__(self): return 8\n    def __getitem__(self, i): return {'x': torch.ones(4), 'target': torch.ones(1)}\n"
    )
    text = SPEC.replace("pdsl.models:gpt", "beside:build").replace("layers = 2; width = 16; heads = 2; context = 8", "width = 4")
    text = text.replace('source("pdsl.data:python_source", context = 8)', '"rows:Rows"').replace("steps = 6", "steps = 6; objective = mse")
    (folder / "own.pdsl").write_text(text)
    assert main(["check", "own.pdsl"]) == 0, capsys.readouterr().out
    assert main(["plan", "own.pdsl"]) == 0
    assert "beside:build" in capsys.readouterr().out


HOSTILE = 'import pathlib\npathlib.Path("ran").touch()\ndef build():\n    raise SystemExit\n'


def test_without_the_model_no_torch_is_imported_and_no_code_is_run(folder):
    (folder / "hostile.py").write_text(HOSTILE)
    (folder / "hostile.pdsl").write_text(
        SPEC.replace("pdsl.models:gpt", "hostile:build").replace("pdsl.data:python_source", "hostile:build")
    )
    code = "import sys; from pdsl.cli import main; status = main(sys.argv[1:]); print('torch' in sys.modules, status)"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--no-model", "hostile.pdsl"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False 0"
    assert not (folder / "ran").exists()


def test_the_second_check_of_a_file_needs_no_torch(folder):
    main(["check", "job.pdsl"])
    code = "import sys; from pdsl.cli import main; status = main(['check', 'job.pdsl']); print('torch' in sys.modules, status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"


# --- plan -----------------------------------------------------------------------------------------------------------------------------------


def test_plan_shows_patterns_lines_and_the_schedule(capsys):
    assert main(["plan", "job.pdsl"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "job: 2 ranks" in out
    assert "one_f_one_b, 2 positions, 2 microbatches" in out
    assert "     4  **       replicate()" in out


def test_a_written_plan_is_shown_and_is_the_same(folder, capsys):
    assert main(["plan", "job.pdsl", "-o", "plan.json"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert main(["plan", "plan.json"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def test_a_written_plan_finds_the_modules_of_its_spec_from_any_directory(folder, monkeypatch, capsys):
    from pdsl.commands import _read_plan

    (folder / "plans").mkdir()
    assert main(["plan", "job.pdsl", "-o", "plans/plan.json"]) == 0
    text = (folder / "plans" / "plan.json").read_text()
    assert _read_plan("plans/plan.json", text).job.directory == "."
    monkeypatch.chdir("/")
    assert Path(_read_plan(str(folder / "plans" / "plan.json"), text).job.directory) == folder


def test_a_plan_that_was_changed_by_hand_is_refused(folder, capsys):
    main(["plan", "job.pdsl", "-o", "plan.json"])
    written = json.loads((folder / "plan.json").read_text())
    written["value"]["layouts"].pop()
    (folder / "plan.json").write_text(json.dumps(written))
    capsys.readouterr()
    assert main(["plan", "plan.json"]) == 1
    assert "plan.json is no plan of this version: the layouts are not those" in capsys.readouterr().err


def test_the_keys_of_a_plan_in_json_are_held(capsys):
    assert main(["plan", "job.pdsl", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["format", "name", "hash", "world_size", "ranks", "memory", "traffic", "time", "proof", "notes", "plan"]
    assert list(found["ranks"][0]) == ["rank", "node", "pipeline", "position", "shard", "tensor", "stages", "layers"]
    assert list(found["memory"][0]) == ["rank", "parameters", "gradients", "optimizer", "activations", "transient", "boundary", "total"]
    assert list(found["traffic"][0]) == ["rank", "all_gather", "reduce_scatter", "gradient_sum", "tensor", "point_to_point", "total"]
    assert list(found["time"]) == ["step", "ideal", "bubble", "templates"]
    assert found["world_size"] == len(found["ranks"]) == 2


def test_the_same_spec_gives_the_same_bytes_in_every_process(folder):
    main(["check", "job.pdsl"])
    for seed in ("1", "2"):
        done = command("plan", "job.pdsl", "-o", f"plan{seed}.json", env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
    assert (folder / "plan1.json").read_bytes() == (folder / "plan2.json").read_bytes()


def test_the_schedule_is_written_as_a_picture(folder, capsys):
    assert main(["plan", "job.pdsl", "--svg", "schedule.svg"]) == 0
    assert (folder / "schedule.svg").read_text().startswith("<svg ")
    assert main(["plan", "job.pdsl", "--svg", "no/such/folder.svg"]) == 2
    assert "no/such/folder.svg cannot be written" in capsys.readouterr().err


def test_origins_tell_where_values_came_from(capsys):
    assert main(["plan", "job.pdsl", "--origins", "--profile", "large", "--set", "mesh.pp=2"]) == 0
    rows = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ") and len(line.split()) > 1
    }
    assert rows["train.batch"].split(maxsplit=1) == ["8", "profile large, line 11"]
    assert rows["mesh.pp"].split(maxsplit=1) == ["2", "--set mesh.pp=2"]
    assert rows["train.optimizer.lr"].split(maxsplit=1) == ["0.01", "line 9"]
    assert rows["train.accumulate"].split(maxsplit=1) == ["1", "default"]


def test_the_result_of_a_pass_is_shown(capsys):
    assert main(["plan", "job.pdsl", "--print-after", "layouts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("after layouts:\n")
    assert "tok_embeddings.weight" in out
    assert main(["plan", "job.pdsl", "--print-after", "layout"]) == 2
    assert "the planner has no pass 'layout'; it has layouts, budget, templates, pipelines" in capsys.readouterr().err


def test_findings_of_a_broken_spec_go_to_stderr(folder, capsys):
    (folder / "bad.pdsl").write_text(SPEC.replace("microbatches = 2", "microbatches = 1"))
    for name in ("plan", "run", "verify"):
        assert main([name, "bad.pdsl"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "error[PDL402]" in err


def test_open_sizes_are_settled_by_world(folder, capsys):
    (folder / "open.pdsl").write_text(SPEC.replace("axis pp = 2", "axis dp = rest; axis pp = 2"))
    assert main(["plan", "open.pdsl"]) == 1
    assert "say the number of ranks" in capsys.readouterr().err
    assert main(["plan", "open.pdsl", "--world", "4"]) == 0
    assert "open: 4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "{}", '{"version": 99}', '{"plan": 1}'])
def test_a_file_that_is_no_plan_is_one_message(text, folder, capsys):
    (folder / "plan.json").write_text(text)
    assert main(["run", "plan.json"]) == 1
    assert capsys.readouterr().err.startswith("pdsl: plan.json is no plan of this version: ")


def test_a_plan_takes_no_overrides(folder, capsys):
    main(["plan", "job.pdsl", "-o", "plan.json"])
    assert main(["plan", "plan.json", "--set", "train.batch=8"]) == 2
    assert main(["plan", "plan.json", "--origins"]) == 2
    assert main(["plan", "plan.json", "--print-after", "layouts"]) == 2
    assert capsys.readouterr().err.count("give the spec") == 3


# --- explain --------------------------------------------------------------------------------------------------------------------------------


def test_what_works_together_is_a_table_and_part_of_a_rules_page(capsys):
    assert main(["explain", "composability"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["features", "PDSL", "rule", "torch", "by", "itself", "seen", "with"]
    assert any(line.startswith("backwards in halves x memory.reshard = true") and "PDL415" in line for line in table)
    assert main(["explain", "PDL415"]) == 0
    assert "torch by itself: gradients are silently wrong" in " ".join(capsys.readouterr().out.split())


def test_a_rule_is_explained_by_code_number_and_name(capsys):
    pages = []
    for code in ("PDL402", "pdl402", "402", "microbatches-against-schedule"):
        assert main(["explain", code]) == 0
        pages.append(capsys.readouterr().out)
    assert len(set(pages)) == 1
    assert pages[0].startswith("PDL402 microbatches-against-schedule (error)\n")
    assert "\nBetter\n" in pages[0]


def test_all_codes_are_listed_and_held(capsys):
    assert main(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("PDL")]
    families = {
        "0": "01 02",
        "1": "01 02 03 04 05 06 07 08 09 90",
        "2": "01 02 03 04",
        "3": "01 02 03 04 05 06 07 08 09 10 11 12 13 20 30 31 32 36 37",
        "4": "01 02 03 04 05 06 08 09 10 11 13 14 15 16",
        "5": "01 02 03 04 05 06 07",
        "7": "01 02 03 04 05 06 07 08 09 10 11 12",
        "8": "02 03 04 05 06 07 08 09 20 21 22",
        "9": "00 01 02 03",
    }
    assert listed == [f"PDL{family}{number}" for family, numbers in families.items() for number in numbers.split()]


def test_an_unknown_code_names_the_near_one(capsys):
    assert main(["explain", "PDL4O2"]) == 2
    assert "did you mean PDL402?" in capsys.readouterr().err


# --- run and verify, in processes of their own ----------------------------------------------------------------------------------------------


def test_run_trains_on_local_processes_and_writes_metrics(folder):
    done = command("run", "job.pdsl", "--steps", "4", "--metrics", "out/run.jsonl")
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in (folder / "out" / "run.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries] == [0, 1, 2, 3]
    assert [list(e) for e in entries] == [["step", "loss", "grad_norm", "samples", "seconds", "generation", "digest"]] * 4
    first, second, third = done.stdout.splitlines()
    assert first.startswith("4 steps, 16 samples in ")
    assert first.endswith(" samples/s")
    assert second == f"loss {entries[0]['loss']:.4f} at the first step, {entries[-1]['loss']:.4f} at the last"
    assert third == "metrics are in out/run.jsonl"


def descendants(pid):
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def test_an_interrupt_ends_every_rank_quickly_with_130(folder):
    run = [sys.executable, "-m", "pdsl", "run", "job.pdsl", "--steps", "1000000", "--metrics", "run.jsonl"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            deadline = time.monotonic() + 60
            while not ((folder / "run.jsonl").exists() and (folder / "run.jsonl").stat().st_size):
                assert started.poll() is None, started.communicate()
                assert time.monotonic() < deadline, "the run took no step"
                time.sleep(0.05)
            ranks = descendants(started.pid)
            begun = time.monotonic()
            started.send_signal(signal.SIGINT)
            out, err = started.communicate(timeout=15)
        finally:
            started.kill()
    assert time.monotonic() - begun < 10
    assert started.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "pdsl: interrupted"
    assert "Traceback" not in err
    assert len(ranks) >= 2
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []


def test_verify_compares_with_one_process(folder):
    main(["plan", "job.pdsl", "-o", "plan.json"])
    done = command("verify", "plan.json", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "largest deviations" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal: ")


def test_deviations_beyond_the_tolerance_end_with_1(folder, monkeypatch, capsys):
    from pdsl.runtime import launch, verify

    def trace(loss):
        return verify.Trace((loss,), (1.0,), ({},), ({},))

    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: [])
    monkeypatch.setattr(verify, "assemble", lambda plan, ranks: trace(1.5))
    monkeypatch.setattr(verify, "oracle", lambda plan, steps: trace(1.0))
    assert main(["verify", "job.pdsl", "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "  loss              0  5.00e-01     1  too far" in out
    assert out.splitlines()[-1] == "not equal: 1 tensor beyond 1e-05; the largest deviation is loss"


def test_a_comparison_that_fails_says_what_in_the_model_may_be_why():
    from pdsl.lowering.facts import ModelFacts
    from pdsl.render.verify import render_verify
    from pdsl.runtime.verify import Deviation, VerifyReport

    def told(relative):
        report = VerifyReport(1, 1e-5, (Deviation("loss", 0, relative, 1.0),), (1.0,), (1.0,))
        return render_verify(report, facts=ModelFacts("m:f", (), (), random=True, warnings=("bn normalises over rows",))).splitlines()

    assert told(0.0)[-1].startswith("equal: ")
    assert told(0.5)[-1] == "  - bn normalises over rows"


def test_a_quick_reader_of_a_plan_is_no_error():
    pipe = f"set -o pipefail; {sys.executable} -m pdsl plan job.pdsl | head -1"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("job: 2 ranks")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_told(folder):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdsl", "explain"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (2, "pdsl: the output cannot be written: No space left on device\n")


def test_output_survives_an_encoding_without_box_characters():
    done = command("plan", "job.pdsl", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_what_an_encoding_lacks_is_escaped(folder):
    (folder / "umlaut.pdsl").write_text(SPEC + "param größe: int = 1\n", encoding="utf-8")
    done = command("check", "umlaut.pdsl", "--no-model", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode in {0, 1}
    assert done.stderr == ""
    assert r"gr\xf6\xdfe" in done.stdout


def test_a_model_that_ends_the_process_is_no_success(folder, capsys):
    (folder / "hostile.py").write_text(HOSTILE)
    (folder / "hostile.pdsl").write_text(SPEC.replace("pdsl.models:gpt", "hostile:build").replace(MODEL_ARGUMENTS, ""))
    assert main(["check", "hostile.pdsl"]) == 1


@pytest.mark.parametrize("name", ["quickstart", "tensor", "digits", "starter", "resilient", "two_losses"])
def test_the_examples_are_clean_and_have_a_plan(name, capsys):
    file = str(ROOT / "pdsl" / "examples" / f"{name}.pdsl")
    assert main(["check", file, "--fail-on", "warning"]) == 0
    assert main(["plan", file]) == 0
    world = {"quickstart": 4, "tensor": 4, "digits": 2, "starter": 2, "resilient": 10, "two_losses": 7}[name]
    assert f"{name}: {world} ranks" in capsys.readouterr().out
