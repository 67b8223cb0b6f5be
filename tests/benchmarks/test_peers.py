"""Side by side: passes are counted, turns rotate, texts compared, and the table says who did not run. Tiny models."""

import csv
import io
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.common import store
from stages.common.drafters import DrafterCard, save_drafter
from stages.common.models import config_digest
from stages.common.tiny import VOCABULARY, save_tiny
from stages.common.tokenizers import load_tokenizer
from tests.benchmarks import batch, context, overhead, peers, side_by_side, tables, vanilla
from tests.benchmarks.checkout import Models
from tests.benchmarks.packages import Courier, DFlash, FlashSpec, LlamaCpp, Sequential
from tests.benchmarks.side_by_side import Calls, Text, first_difference
from tests.benchmarks.systems import Assisted, Generate, Ours, PromptLookup
from tests.stages import laboratory
from tests.stages.scripted import causal_lm, prompt_of, tiny_drafter

METHOD, LIMIT = "specdiff2_tree", 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verifier's folder in a checkout with prompts, a drafter pinned for METHOD, and the verifier as student."""
    root = tmp_path_factory.mktemp("checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        verifier = store.verifier_folder(laboratory.PROFILE)
        save_tiny(verifier, causal_lm(copy=5))
        laboratory.write_params()
        laboratory.write_prompts(laboratory.BENCHMARK, 3)
        pinned = store.drafter_folder(laboratory.PROFILE, "streak")
        laboratory.write_drafter(pinned, noise=0.01)
        manifest = {"drafter": "streak", "folder": str(pinned), "sha256": store.sha256_folder(pinned)}
        store.write_json(store.manifest_file(laboratory.PROFILE, METHOD), manifest)
        write_student(verifier)
        return verifier.resolve()


def write_student(verifier: Path) -> None:
    drafter = tiny_drafter(words=range(3, VOCABULARY))  # every layer, all words but the special ones
    card = DrafterCard(
        kind="causal",
        block_size=1,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix="own",
        layers=(0, 1),
        verifier_tokenizer=load_tokenizer(verifier).fingerprint(),
        verifier_config=config_digest(verifier),
        vocab_size=VOCABULARY,
        draft_vocab_size=len(drafter.d2t),
        parameters=7,
        objective="token_ce",
        provenance={},
    )
    folder = store.drafter_folder(laboratory.PROFILE, "student")
    folder.mkdir(parents=True)
    save_drafter(folder, drafter, card)


class Scripted:
    """A system that answers with written-down tokens, seconds and passes, and keeps a diary."""

    version, note = "1", "scripted"

    def __init__(self, name, diary, *, ids=(5, 6, 7, 8), seconds=2.0, calls=4, reason=None, fails_on=None):
        self.name, self.diary, self.reason, self.fails_on = name, diary, reason, fails_on
        self.text = Text(list(ids), seconds, None, calls)

    def available(self):
        return self.reason

    def generate(self, ids, max_new_tokens):
        if list(ids) == self.fails_on:
            raise RuntimeError("out of paper\nmore")
        self.diary.append((self.name, list(ids), max_new_tokens))
        return self.text


class Body(nn.Module):
    def forward(self, rows):
        return (torch.zeros(1, rows, 2),)


def measured(systems, prompts=([1], [2], [3])):
    return side_by_side.measure(systems, prompts, max_new_tokens=9, warm_up_tokens=2, say=lambda _: None)


@pytest.mark.parametrize(
    ("passes", "count"),
    [
        ([7, 1, 1], 3),  # the prompt, then two tokens
        ([4, 3, 1], 2),  # the prompt in two parts
        ([9, 4], 2),  # drafts read with the prompt
        ([7, 8, 9], 3),  # no cache: all of it again
        ([4], 0),  # cut off before the prompt was read
    ],
)
def test_passes_are_counted_from_the_prompts_last_token_on(passes, count):
    body, prompt_tokens = Body(), 7
    calls = Calls(body)
    for _ in range(2):  # a second answer starts at none
        calls.start(prompt_tokens)
        for rows in passes:
            body(rows)
        assert calls.count == count
        assert (calls.first_at > 0) == (count > 0)


@pytest.mark.parametrize(
    ("ids", "wanted", "place"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 3], [1, 2], 1),
        ([1], [1, 2], 1),
        ([1, 2, 3], [1, 2], 2),
        ([9], [1], 0),
    ],
)
def test_the_first_difference(ids, wanted, place):
    assert first_difference(ids, wanted) == place


def test_turns_rotate_after_a_warm_up_of_all():
    diary: list = []
    measured([Scripted(name, diary) for name in "abc"])
    assert diary[:3] == [(name, [1], 2) for name in "abc"]
    assert [name for name, *_ in diary[3:]] == [*"abc", *"bca", *"cab"]
    assert [(ids, limit) for _, ids, limit in diary[3::3]] == [([1], 9), ([2], 9), ([3], 9)]


def test_what_cannot_run_and_what_fails_is_left_out_with_its_reason():
    diary: list = []
    systems = [Scripted("a", diary), Scripted("b", diary, reason="not installed"), Scripted("c", diary, fails_on=[2])]
    found = measured(systems)
    assert list(found.texts) == ["a"]
    assert len(found.texts["a"]) == 3
    assert found.skipped == {"b": "not installed", "c": "fails on prompt 1: RuntimeError: out of paper"}
    assert measured([Scripted("d", diary, fails_on=[1])]) == (
        {},
        {"d": "fails on the warm-up: RuntimeError: out of paper"},
    )


def test_the_row_by_hand():
    base = [Text([5, 6, 7, 8], 2.0, 0.5, 4), Text([5, 6], 1.0, 0.5, 2)]
    quick = [Text([5, 6, 7, 8], 1.0, None, 2), Text([5, 9, 9, 9], 1.0, None, 2)]
    found = side_by_side.Measured({"base": base, "quick": quick}, {})
    row = side_by_side.row("quick", found, reference="base", base="base")
    assert row["tokens_per_s"] == 4.0
    assert row["ratio"] == pytest.approx((4 * 2.0 / 4 + 4 * 1.0 / 2) / 2.0)  # the base needs 4 s for as many tokens
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["tokens_per_call"] == 2.0
    assert (row["equal_texts"], row["first_difference"], row["earliest_difference"]) == (1, 1, 1)
    assert row["decode_tokens_per_s"] is None
    own = side_by_side.row("base", found, reference="base", base="base")
    assert (own["ratio"], own["ratio_low"], own["ratio_high"]) == (1.0, 1.0, 1.0)
    assert own["decode_tokens_per_s"] == (6 - 2) / (3.0 - 1.0)
    assert (own["tokens_per_call"], own["equal_texts"], own["first_difference"]) == (1.0, 2, None)


def test_the_table_names_everyone():
    systems = [
        Scripted(peers.REFERENCE, []),
        Scripted(peers.BASE, [], seconds=4.0),
        Scripted("odd", [], ids=(5, 6, 1), calls=1),
        Scripted("gone", [], reason="not installed: pip install gone"),
    ]
    lines, rows = peers.page(systems, measured(systems), {peers.BASE: 300.4}, ["above"])
    page = "\n".join(lines)
    assert lines[0] == "above"
    assert "| ours: vanilla 1 | 2.0 | 2.00 [2.00, 2.00] |  | 1.00 | 3 of 3 |  |  | scripted |" in page
    assert "| odd 1 | 1.5 | 1.50 [1.50, 1.50] |  | 3.00 | 0 of 3 | 2 |  | scripted |" in page
    assert "| 300 | scripted |" in page
    assert "- gone: not installed: pip install gone" in page
    read = list(csv.DictReader(io.StringIO(tables.csv_text(rows))))
    assert [row["system"] for row in read] == [peers.REFERENCE, peers.BASE, "odd", "gone"]
    assert (read[-1]["skipped"], read[-1]["tokens_per_s"]) == ("not installed: pip install gone", "")


def test_an_unknown_system_is_refused():
    systems = [Scripted(name, []) for name in (peers.REFERENCE, peers.BASE, "x", "y")]
    assert [s.name for s in peers.chosen(systems, ["y"])] == [peers.REFERENCE, peers.BASE, "y"]
    assert peers.chosen(systems, []) == systems
    with pytest.raises(ValueError, match="there is no z; there are ours: vanilla"):
        peers.chosen(systems, ["z"])


def test_adapters_of_transformers_answer_as_we_do(folder):
    models = Models(folder, dtype="float32")
    systems = [
        *(Ours(models, method) for method in ("vanilla", METHOD)),
        *(Generate(models), Assisted(models), PromptLookup(models, tokens=3)),
    ]
    prompts = [prompt_of(length, seed=length) for length in (4, 9, 30)]
    found = side_by_side.measure(systems, prompts, max_new_tokens=LIMIT, warm_up_tokens=3, say=lambda _: None)
    assert found.skipped == {}
    rows = {name: side_by_side.row(name, found, reference=peers.REFERENCE, base=peers.BASE) for name in found.texts}
    for name, row in rows.items():
        assert row["equal_texts"] == len(prompts), name
        assert row["new_tokens"] > len(prompts), name
    for plain in (peers.REFERENCE, peers.BASE):
        assert rows[plain]["tokens_per_call"] == 1.0
        assert all(0 < (text.prefill_seconds or 0.0) < text.seconds for text in found.texts[plain])
    assert rows["transformers assisted"]["tokens_per_call"] > 1.5  # its assistant is the verifier
    assert rows[f"ours: {METHOD}"]["tokens_per_call"] > 1.0
    assert rows["transformers prompt lookup"]["tokens_per_call"] >= 1.0


def test_the_student_never_offers_what_it_has_no_word_for(folder):
    models = Models(folder, dtype="float32")
    ids_1T = torch.tensor([prompt_of(9)])
    logits_V, own_V = (lm(ids_1T).logits[0, -1] for lm in (models.student, models.causal_lm))
    assert len(logits_V) == len(own_V) == VOCABULARY  # phantoms are cut
    torch.testing.assert_close(logits_V[3:], own_V[3:])
    assert bool((logits_V[:3] < logits_V[3:].min()).all())


def test_optional_systems_say_why_they_cannot_run(folder, monkeypatch):
    monkeypatch.setattr("tests.benchmarks.packages.find_spec", lambda _: None)
    models = Models(folder, dtype="float32")
    assert "publishes no draft model" in (DFlash(models, None).available() or "")
    assert DFlash(models, folder).available() == "not installed: pip install dflash"
    assert LlamaCpp(models, None, threads=1, context=64).available() == "not installed: pip install llama-cpp-python"
    away = Models(folder.parent / "another" / "models" / "verifier", dtype="float32")
    assert "no draft model" in (Assisted(away).available() or "")


@pytest.mark.parametrize(("module", "adapter"), [("flashspec", FlashSpec), ("seqspecdecod", Sequential)])
def test_packages_answer_as_we_do_where_they_are_installed(folder, module, adapter):
    pytest.importorskip(module)
    models, ids = Models(folder, dtype="float32"), prompt_of(9)
    ours, theirs = (system.generate(ids, LIMIT) for system in (Ours(models, "vanilla"), adapter(models)))
    assert theirs.ids == ours.ids
    assert theirs.verifier_calls < ours.verifier_calls == len(ours.ids)  # the draft model is the verifier


def test_the_courier_carries_ids_both_ways():
    courier = Courier([4, 5], end_id=2)
    assert courier([courier.apply_chat_template([])], return_tensors="pt").input_ids.tolist() == [[4, 5]]
    assert courier.convert_tokens_to_ids("</think>") == courier.unk_token_id
    courier.decode([])
    courier.decode([7, 8], skip_special_tokens=True)
    assert courier.output_ids == [7, 8]


def test_llama_cpp_by_a_stand_in(folder):
    """Stops at an end id, counts calls of `eval`, and starts each prompt anew."""

    class Llama:
        resets = 0

        def reset(self):
            self.resets += 1

        def eval(self, tokens):
            pass

        def generate(self, ids, **_):
            for token in (7, 8, models.end_ids[0], 9):
                self.eval(ids)
                yield token

    models = Models(folder, dtype="float32")
    system = LlamaCpp(models, folder, threads=1, context=64)
    system.llama = system.counting(Llama())
    for limit, ids in ((9, [7, 8, models.end_ids[0]]), (2, [7, 8])):
        text = system.generate([4, 5], limit)
        assert (text.ids, text.verifier_calls) == (ids, len(ids))
    assert system.llama.resets == 2


def test_memory_of_this_process():
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell")
    assert peers.peak_mb() > 50


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        (peers, ["--methods", METHOD, "--systems", f"ours: {METHOD}", "--no-memory"], f"| ours: {METHOD} | "),
        (vanilla, [], "our vanilla is "),
        (
            context,
            ["--methods", "vanilla", METHOD, "--short", "20", "--long", "100", "--rounds", "2"],
            f"| {METHOD} | ",
        ),
        (overhead, ["--methods", "vanilla", METHOD], f"| {METHOD} | "),
        (batch, ["--methods", METHOD, "--batches", "2", "--groups", "1", "--group", "2"], f"- `{METHOD}` is faster"),
    ],
)
def test_scripts_write_their_tables(folder, tmp_path, script, words, says):
    prompts = folder.parents[3] / store.prompts_file(laboratory.PROFILE, laboratory.BENCHMARK)
    usual = [
        "--model",
        str(folder),
        "--prompts",
        str(prompts),
        "--count",
        "2",
        "--max-new-tokens",
        "6",
        "--threads",
        "1",
    ]
    script.main([*usual, *words, "--out", str(tmp_path / "table.of.it")])
    page = (tmp_path / "table.of.it.md").read_text()
    assert says in page
    assert f"`python -m {script.__name__} --model" in page
    assert "commit " in page
    rows = list(csv.DictReader((tmp_path / "table.of.it.csv").open()))
    assert len(rows) >= 2
