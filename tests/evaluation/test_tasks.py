"""Benchmark tasks by lm_eval, from local files."""

import json

import pytest
from corpora import call
from tiny import dense

import mixdepth
from mixdepth.cli import main
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.evaluation.tasks import evaluate_tasks, table

CHOICE = """
task: which_end
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture
def task(tmp_path):
    """Write a task with sixteen questions of three choices."""
    rows = [{"question": f"{n}:", "choices": ["a", "b", "cc"], "answer": n % 3} for n in range(16)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "which_end.yaml"
    file.write_text(CHOICE.format(file=data))
    return str(file)


@pytest.fixture
def models(tmp_path):
    plain = dense(vocab_size=256)
    folders = []
    for name, model in (("plain", plain), ("mod", mixdepth.route(dense(vocab_size=256), capacity=1.0, gate="one"))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    return folders


def test_a_routed_model_at_full_capacity_scores_as_the_plain_one(task, models):
    found = evaluate_tasks(models, [task])
    plain, mod = (found[name]["which_end"] for name in models)
    assert plain == mod
    assert 0 <= plain["acc"] <= 1
    assert "which_end" in table(found)


def test_the_command_prints_a_table_or_refuses(task, models, tmp_path, capsys):
    process = call("eval", *models, "--tasks", task, "--limit", "4", "--json", str(tmp_path / "found.json"))
    assert process.returncode == 0, process.stderr
    assert "acc_norm" in process.stdout
    assert "sample_len" not in process.stdout
    assert "±" in process.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\n")
    assert json.loads((tmp_path / "found.json").read_text())[models[0]]["which_end"]["acc"] is not None
    for arguments, sentence in (
        (["--tasks", "nowhere.yaml"], "there is no task file 'nowhere.yaml'"),
        (["--tasks", task, "--corpus", "stdlib"], "tasks bring their own text"),
        (["--tasks", task, "--json", "nowhere/x.json"], "'nowhere/x.json' cannot be written: there is no folder"),
        (["--tasks", task, "--limit", "-3"], "limit must be a whole number of at least 1, not -3"),
        (["--tasks", str(broken)], "broken"),
    ):
        assert main(["eval", *models, *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_another_file_with_the_same_name_is_not_evaluated_instead(task, models, tmp_path):
    (tmp_path / "further").mkdir()
    (tmp_path / "further/other.yaml").write_text("task: which_end\n")
    with pytest.raises(ValueError, match=r"which_end.yaml' and .*other.yaml' both say task: which_end: rename one"):
        evaluate_tasks(models[:1], [task])
    (tmp_path / "further/other.yaml").write_text("task:\n  - which_end\n")
    with pytest.raises(ValueError, match=r"other.yaml' is not a task of lm_eval: it has no line 'task: NAME'"):
        evaluate_tasks(models[:1], [str(tmp_path / "further/other.yaml")])
