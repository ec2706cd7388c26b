"""The program of examples/ around the engine: what it prints, writes and returns. On a tiny model."""

import argparse
import io
import json

import pytest
import tiny_llama
import torch

pytest.importorskip("rich")
pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import draft_models  # noqa: E402
from rich.console import Console  # noqa: E402

import generate  # noqa: E402
import serve  # noqa: E402
from engine.decode import Engine, RoundRecord  # noqa: E402
from session import Session  # noqa: E402
from ui import Ui, segments_of  # noqa: E402


class Letters:
    """A tokenizer with one id per letter."""

    def encode(self, text):
        return [3 + ord(letter) % (tiny_llama.CONFIG.vocab_size - 3) for letter in text]

    encode_chat = encode

    def decode(self, ids):
        return "".join(chr(ord("0") + token) for token in ids)


def session_with(arguments, with_transformers=False):
    stream = io.StringIO()
    model = tiny_llama.random_model()
    reference = None
    if with_transformers:
        pytest.importorskip("transformers")
        from transformers_baseline import build_transformers_model

        reference = build_transformers_model(model.config, model.weights)
    return (
        Session(
            args=generate.parse_arguments(arguments),
            ui=Ui(Console(file=stream)),
            tokenizer=Letters(),
            engine=Engine(model, stop_ids=[0]),
            transformers_model=reference,
        ),
        stream,
    )


@pytest.fixture
def short_prompts(monkeypatch):
    """The shipped prompts, cut to what the tiny model has positions for."""
    shipped = [(label, text[:60]) for label, text in generate.shipped_prompts()]
    monkeypatch.setattr(generate, "shipped_prompts", lambda: shipped)


def test_eight_prompts_ship_and_the_first_three_are_for_editing():
    labels = [label for label, _ in generate.shipped_prompts()]
    assert len(set(labels)) == len(labels) >= 8
    assert labels[:3] == ["fix_text", "edit_code", "summarise"]
    assert all(text.strip() for _, text in generate.shipped_prompts())


def test_the_demo_shows_rounds_and_ends_with_the_table(short_prompts, tmp_path):
    out = tmp_path / "figures.json"
    session, stream = session_with(
        ["--max-new-tokens", "20", "--json", str(out)], with_transformers=True
    )
    assert generate.run_demo(session) == 0
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "  round   1: " in text and "corrected 1" in text
    assert "batch 1: 8 of 8 identical" in text
    assert "batch 8: 8 of 8 identical" in text
    assert text.index("== figures") > text.index("fix_text, batch 1, T=1")

    figures = json.loads(out.read_text())
    assert figures["environment"]["dtype"] == "float32"
    names = [workload["workload"] for workload in figures["workloads"]]
    assert names == [
        "fix_text, batch 1",
        "edit_code, batch 1",
        "summarise, batch 1",
        "5 other prompts, batch 1",
        "8 prompts, batch 8",
        "fix_text, batch 1, T=1",
    ]
    for workload in figures["workloads"]:
        plain, fast = workload["plain"], workload["speculative"]
        assert len(workload["texts_plain"]) == len(workload["texts"]) == len(workload["prompts"])
        if workload["identical_to_plain"]:
            assert workload["texts_plain"] == workload["texts"]
        assert plain["accepted_length"] == 1.0
        assert fast["accepted_length"] >= 1.0
        ratio = fast["tokens_per_second"] / plain["tokens_per_second"]
        assert workload["speedup_over_plain"] == ratio
        assert fast["tokens_per_second"] == fast["tokens"] / fast["decode_seconds"]
    assert figures["workloads"][0]["transformers"]["tokens"] > 0
    assert figures["workloads"][3]["transformers"] is None
    assert figures["workloads"][4]["identical_to_plain"] == [True] * 8
    assert figures["workloads"][5]["identical_to_plain"] is None


def test_prompts_of_the_command_line_fill_the_batch(tmp_path):
    path = tmp_path / "note.txt"
    path.write_text("say this again, say this again\n")
    out = tmp_path / "figures.json"
    session, stream = session_with(
        ["--prompt", "one two one two", "--prompt-file", str(path), "--batch", "3"]
        + ["--temperature", "1", "--seed", "5", "--max-new-tokens", "12", "--json", str(out)]
    )
    assert generate.run_prompts(session) == 0
    (workload,) = json.loads(out.read_text())["workloads"]
    assert workload["prompts"] == ["prompt 1", "note", "prompt 1"]
    assert workload["prompt_tokens"] == [15, 30, 15]
    assert workload["seeds"] == [5, 6, 7]
    assert workload["temperature"] == 1.0
    assert workload["identical_to_plain"] is None
    assert "note: " in stream.getvalue()


def test_one_new_token_is_nothing_to_time(tmp_path):
    out = tmp_path / "figures.json"
    session, stream = session_with(
        ["--prompt", "one two", "--max-new-tokens", "1", "--json", str(out)], with_transformers=True
    )
    assert generate.run_prompts(session) == 0
    (workload,) = json.loads(out.read_text())["workloads"]
    assert workload["speculative"]["tokens"] == workload["transformers"]["tokens"] == 1
    assert workload["transformers"]["tokens_per_second"] is None
    assert workload["speedup_over_transformers"] is None
    assert "transformers" in stream.getvalue()


def lying(generate_method):
    """An engine whose speculative output has a wrong last token."""

    def wrapped(self, requests, drafter=None, *rest, **options):
        result = generate_method(self, requests, drafter, *rest, **options)
        if drafter is not None:
            result.output_ids[0][-1] += 1
        return result

    return wrapped


def test_check_identity_counts_and_fails(short_prompts, monkeypatch, tmp_path):
    out = tmp_path / "identity.json"
    arguments = ["--check-identity", "--max-new-tokens", "16", "--json", str(out)]
    session, stream = session_with(arguments)
    assert generate.check_identity(session) == 0
    for k in (3, 5, 7):
        assert f"speculative = plain, batch 1, {k} drafts: 8/8 identical" in stream.getvalue()
    assert "specdec linears, fp32: 0 of 24 outputs differ" in stream.getvalue()
    assert "speculative = plain, batch 8: 8/8 identical" in stream.getvalue()
    assert "plain batch 8 = plain batch 1: 8/8 identical" in stream.getvalue()
    figures = json.loads(out.read_text())
    assert len(figures["identity"]) == 5 and len(figures["beside"]) == 3
    assert all(len(same) == 8 and all(same) for same in figures["identity"].values())
    assert all(len(same) == 8 for same in figures["beside"].values())
    differ = sum(not ok for same in figures["beside"].values() for ok in same)
    assert f"torch linears, fp32: {differ} of 24 outputs differ" in stream.getvalue()

    monkeypatch.setattr(Engine, "generate", lying(Engine.generate))
    session, stream = session_with(arguments)
    assert generate.check_identity(session) == 1
    assert "batch 1, 3 drafts: 0/8 identical; different: fix_text, edit_code" in stream.getvalue()
    assert "specdec linears, fp32: 24 of 24 outputs differ" in stream.getvalue()
    assert "batch 8: 7/8 identical; different: fix_text\n" in stream.getvalue()


def test_a_mismatch_fails_the_demo_where_identity_is_claimed(short_prompts, monkeypatch):
    monkeypatch.setattr(Engine, "generate", lying(Engine.generate))
    session, stream = session_with(["--batch", "8", "--max-new-tokens", "8"])
    assert generate.run_prompts(session) == 1
    assert "batch 8: 7 of 8 identical" in stream.getvalue()
    session.args.dtype = "bf16"
    assert generate.run_prompts(session) == 1
    session.args.linear = "torch"
    assert generate.run_prompts(session) == 0


def test_segments_of_a_round():
    record = RoundRecord(
        drafts=[[1, 2, 3], [4, 5], [], [7, 8]],
        committed=[[1, 9], [4, 5, 6], [], [7]],
        num_accepted=[1, 2, 0, 1],
        finished=[False] * 4,
    )
    assert segments_of(record, 0) == [("accepted", [1]), ("dropped", [2, 3]), ("corrected", [9])]
    assert segments_of(record, 1) == [("accepted", [4, 5]), ("corrected", [6])]
    assert segments_of(record, 2) == []
    assert segments_of(record, 3) == [("accepted", [7]), ("dropped", [8])]


def test_a_terminal_gets_colours_and_anything_else_plain_lines():
    segments = [("accepted", [1, 2]), ("dropped", [3]), ("corrected", [4])]
    outputs = {}
    for name, options in {"terminal": {"force_terminal": True}, "file": {}}.items():
        stream = io.StringIO()
        console = Console(file=stream, color_system="standard", legacy_windows=False, **options)
        ui = Ui(console)
        with ui.progress("loading") as advance:
            for done in range(1, 9):
                advance(done, 8)
        ui.show_round(1, segments, Letters().decode)
        ui.show_transcript("name", segments, Letters().decode)
        ui.table(["a", "b"], [[["1", "2"]], [["3", "4"]]])
        outputs[name] = stream.getvalue()
    assert "\x1b[32m12" in outputs["terminal"]  # green
    assert "\x1b[9;31m3" in outputs["terminal"]  # red, struck through
    assert "\x1b[33m4" in outputs["terminal"]  # yellow
    lines = outputs["file"].splitlines()
    assert lines[:4] == [f"loading: {percent}%" for percent in (25, 50, 75, 100)]
    assert lines[4] == '  round   1: accepted 2 "12" | dropped 1 "3" | corrected 1 "4"'
    assert lines[5] == "name: 12[-3-]<4>"
    assert "\x1b" not in outputs["file"] and "\r" not in outputs["file"]


def test_arguments_out_of_range_are_refused(capsys):
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--batch", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_cuda_without_a_device_is_an_error_in_words(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert generate.main(["--device", "cuda"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as done:
        generate.parse_arguments(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--prompt --prompt-file --device --dtype --threads --batch --temperature --seed "
        "--max-new-tokens --json --no-transformers --check-identity --k"
    ).split():
        assert option in text
    assert isinstance(generate.parse_arguments([]), argparse.Namespace)


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_serving_program_tells_of_every_request(monkeypatch, tmp_path, temperature):
    """With drafts scheduled by a table that it measures; outputs are those of plain decoding."""
    monkeypatch.setattr(serve, "shipped_prompts", lambda: [("one", "abcabcabc"), ("two", "xy")])
    config, tensors = draft_models.config_of("dspark"), draft_models.tensors_of("dspark")
    folder, stream = draft_models.write(tmp_path / "dspark", config, tensors), io.StringIO()
    arguments = ["--requests", "5", "--rate", "1e6", "--batch", "2", "--pages", "9", "--k", "3"]
    arguments += ["--max-new-tokens", "8", "--temperature", temperature, "--dspark", str(folder)]
    session = Session(
        args=serve.parse_arguments(arguments),
        ui=Ui(Console(file=stream)),
        tokenizer=Letters(),
        engine=Engine(draft_models.target_model(), stop_ids=[0]),
        transformers_model=None,
    )
    visits, server = serve.visits_of(session), serve.server_of(session)
    plain = session.engine.generate([visit.request for visit in visits])
    serve.serve(session, server, visits)
    *lines, last = stream.getvalue().splitlines()
    assert len(lines) == 5 and all(" tokens, first after " in line for line in lines)
    assert [visit.num_tokens for visit in visits] == list(map(len, plain.output_ids))
    assert last.startswith(f"{plain.num_tokens} tokens in ") and server.drafted > 0
