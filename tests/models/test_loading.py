"""A model that is missing is refused at once if its name is a local path; the hub is asked once, and briefly."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import mixdepth
from mixdepth.models.missing import missing_run


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A folder that holds the folder `demo` with three runs, as the current folder."""
    folder = tmp_path / "here"  # nothing else lies next to it, whatever other tests have left
    for name in ("dense", "routed", "shallow"):
        (folder / "demo" / name).mkdir(parents=True)
        (folder / "demo" / name / "run.json").write_text("{}")
    (folder / "demo/plots").mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_missing_run_is_refused_with_the_runs_next_to_it(demo):
    sentence = "there is no run 'demo/routde'; there are demo/routed, demo/dense, demo/shallow"
    assert missing_run("demo/routde") == sentence
    with pytest.raises(ValueError, match=sentence):
        mixdepth.load("demo/routde")


def test_at_most_five_runs_are_named(demo):
    for number in range(4):
        (demo / "demo" / f"seed-{number}").mkdir()
        (demo / "demo" / f"seed-{number}" / "config.json").write_text("{}")
    assert missing_run("demo/shalow") == (
        "there is no run 'demo/shalow'; there are demo/shallow, demo/dense, demo/routed, demo/seed-0, demo/seed-1 "
        "and 2 more"
    )


@pytest.mark.parametrize("name", ["a/b/c", "./x", "/nowhere/x", "../x", "~/x", "with space", "owner/naïve", "x/", "-x"])
def test_what_cannot_be_a_name_of_the_hub_is_refused(demo, name):
    assert missing_run(name) == f"there is no run {name!r} and no model's folder of this name"


def test_a_path_whose_first_part_is_a_folder_here_is_refused(demo):
    (demo / "texts").mkdir()
    assert missing_run("texts/mod") == "there is no run 'texts/mod' and no model's folder of this name"


def test_a_bare_name_is_refused_only_next_to_a_run_with_a_close_name(demo, monkeypatch):
    monkeypatch.chdir("demo")
    assert missing_run("gpt2") is None
    assert missing_run("smollm2") is None
    assert missing_run("routde") == "there is no run 'routde'; there are routed, dense, shallow"


def test_names_of_the_hub_and_what_exists_are_not_refused(demo):
    for name in ("gpt2", "openai-community/gpt2", "meta-llama/Llama-3.2-1B", "demo", "demo/routed", "demo/plots"):
        assert missing_run(name) is None


def test_a_command_refuses_before_it_imports_torch(demo):
    code = (
        "import sys; from mixdepth.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})); sys.exit(code)"
    )
    for verb in (["generate", "demo/routde", "hi"], ["eval", "demo/dense", "demo/routde"]):
        process = subprocess.run([sys.executable, "-c", code, *verb], capture_output=True, text=True)
        assert process.returncode == 2
        assert process.stderr.startswith("mixdepth: there is no run 'demo/routde'; there are demo/routed, ")
        assert process.stdout.strip() == "[]"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that answers every request with the same status, and the list of what it was asked."""
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.asked, server.status = asked, 503
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield server
    server.shutdown()
    server.server_close()


def generate(name):
    """Run `generate` in a process of its own: huggingface_hub reads its settings when it is imported."""
    command = [sys.executable, "-m", "mixdepth", "generate", name, "hi"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("status", "problem"), [(404, "the hub has none that you may read"), (503, "the hub answers 503")]
)
def test_the_hub_is_asked_once(hub, status, problem):
    hub.status = status
    process = generate("owner/nothere")
    assert process.returncode == 2
    assert hub.asked == ["/owner/nothere/resolve/main/config.json"]
    assert len(process.stderr.splitlines()) == 1
    assert f"'owner/nothere' is neither a run nor a model's folder nor a model of the hub ({problem})" in process.stderr


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    process = generate("owner/nothere")
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert "nor a model of the hub (the hub cannot be reached: " in process.stderr
