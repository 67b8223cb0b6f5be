"""What the verifier cached comes back as it was stored, and training on it scores what decoding on the cache scores."""

from dataclasses import replace

import pytest
import torch

from stages.common import windows
from stages.common.contexts import Contexts, holds, write_index, write_shard
from stages.common.decode import decode_batch
from stages.common.tiny import VOCABULARY
from stages.common.windows import Example
from tests.stages.scripted import DAMAGES, KINDS, prompt_of, spoil, tiny_drafter, tiny_verifier

WORDS = [word for word in range(VOCABULARY) if word % 3]
LAYERS = [4, 1, 7]  # as the index has them: in no order


def stored(folder):
    """Two shards with a text of its own length each, every layer's numbers apart; what was written."""
    g = torch.Generator().manual_seed(0)
    made = {f"text/{n}": torch.randn(len(LAYERS), 2, 2, n, 4, generator=g) for n in (5, 9)}
    for number, (name, kv) in enumerate(made.items()):
        write_shard(folder / f"{number}.safetensors", {name: kv})
    write_index(folder, LAYERS, {name: f"{number}.safetensors" for number, name in enumerate(made)})
    return made


@pytest.mark.parametrize("layers", [[4, 1, 7], [1, 4, 7], [7], [7, 1], []])
def test_the_layers_asked_for_come_back_in_the_order_asked(tmp_path, layers):
    made, contexts = stored(tmp_path), Contexts(tmp_path, layers)
    for name, kv in made.items():
        found = contexts[name]
        assert found.dtype == torch.float16
        assert torch.equal(found, kv[[LAYERS.index(layer) for layer in layers]].half())


@pytest.mark.parametrize("layers", [[0, 4, 9], [9, 0]])
def test_layers_that_were_not_kept_are_named_with_the_remedy(tmp_path, layers):
    stored(tmp_path)
    wanted = r"adapt\.layers: .* layers \[4, 1, 7\], not of \[0, 9\]; add them to trajectories\.keep_layers"
    with pytest.raises(ValueError, match=wanted):
        Contexts(tmp_path, layers)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_others_can_be_read(tmp_path, damage):
    made = stored(tmp_path)
    spoil(tmp_path, damage)
    contexts = Contexts(tmp_path, LAYERS)
    assert torch.equal(contexts["text/5"], made["text/5"].half())
    with pytest.raises(ValueError, match=r"1\.safetensors: damaged or half-written .*; run dvc repro trajectories"):
        contexts["text/9"]


def test_contexts_that_are_not_there_are_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"index\.json: not found; run dvc repro trajectories"):
        Contexts(tmp_path / "contexts", [1])


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_training_on_stored_contexts_scores_as_decoding_on_the_cache(tmp_path, kind, tied, window):
    """Texts of several lengths, one of them cut, in one pass; float16 storage moves a score of 6 by less than 0.01."""
    verifier = tiny_verifier(kind, tied)
    drafter = tiny_drafter(kind, tied, layers=[1], words=WORDS, prefix="verifier")
    prompts = [prompt_of(length, seed=length) for length in (3, 11, 6)]
    names = [f"text/{len(prompt)}" for prompt in prompts]
    settings = {"seed": 1, "temperature": 1.3, "max_new_tokens": 9, "batch_size": 2}
    texts = decode_batch(verifier, prompts, keys=names, keep_layers=[0, 1], **settings)
    write_shard(tmp_path / "0", {name: text.context for name, text in zip(names, texts, strict=True)})
    write_index(tmp_path, [0, 1], dict.fromkeys(names, "0"))
    found = [
        Example(id=name, ids=(*prompt, *text.output_ids), prompt_length=len(prompt))
        for name, prompt, text in zip(names, prompts, texts, strict=True)
    ]
    found[1] = replace(found[1], ids=found[1].ids[:16])
    contexts = Contexts(tmp_path, drafter.layers)
    draws = {"windows": 6, "window": window, "full_mask_share": 1.0, "seed": 0, "step": 0}
    batch = windows.collate(found, drafter, contexts, **draws)
    scores_BWGV = drafter.logits(windows.hidden(drafter, batch))
    assert scores_BWGV.shape == (3, 6, window, len(WORDS))
    for e, anchors, scores_WGV in zip(found, batch.layout.target_BWG[:, :, 0].tolist(), scores_BWGV, strict=True):
        assert len(set(anchors)) > 3, "several places of each text"
        for anchor, scores_GV in zip(anchors, scores_WGV, strict=True):
            cache = verifier.new_cache(1)
            verifier.prefill(e.ids[: anchor - 1], cache)
            wanted_GV = drafter.draft([e.ids[anchor - 1]], window, cache.lend(drafter.layers))
            torch.testing.assert_close(scores_GV, wanted_GV, rtol=0, atol=2e-2)


def test_what_float16_cannot_hold_is_refused_and_not_written(tmp_path):
    path = tmp_path / "0.safetensors"
    with pytest.raises(ValueError, match=r"text 'b' are beyond float16.*adapt\.prefix: own"):
        write_shard(path, {"a": torch.ones(1, 2, 2, 3, 4), "b": torch.full((1, 2, 2, 3, 4), 7e4)})
    assert not list(tmp_path.iterdir())


def test_a_text_that_is_not_there_is_named(tmp_path):
    stored(tmp_path)
    with pytest.raises(ValueError, match=r"index\.json: nothing is kept of text 'text/6'; run dvc repro trajectories"):
        Contexts(tmp_path, LAYERS)["text/6"]


def test_a_file_holds_its_texts_whole_or_not_at_all(tmp_path):
    stored(tmp_path)
    path = tmp_path / "1.safetensors"
    assert holds(path, ["text/9"])
    assert not holds(path, ["text/5"])
    assert not holds(path, ["text/9", "text/5"])
    assert not holds(tmp_path / "2.safetensors", [])
    path.write_bytes(path.read_bytes()[:-1])
    assert not holds(path, ["text/9"])
