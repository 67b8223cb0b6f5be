"""Adapters: what they train and what they share, their files, and merging."""

import json

import pytest
import torch
from safetensors.torch import load_file

from stages.common import lora, training
from stages.common.drafters import load_drafter, save_drafter
from stages.common.lora import Lora
from stages.common.params import ParamError
from tests.stages.crew import Job, settings, work
from tests.stages.scripted import causal_lm, tiny_drafter
from tests.stages.test_drafters import CONFIG, card_of

pytest.importorskip("peft")

TARGETS = ("q_proj", "v_proj", "down_proj", "lm_head")
SETTINGS = Lora(rank=3, alpha=6.0, targets=TARGETS, merge=False)
IDS = [9, 8, 7, 6]


def scores(drafter, window=4):
    return drafter.eval().draft(IDS, window, drafter.new_cache(1))


def adapted(seed=1, *, drafter=None, settings=SETTINGS):
    """A drafter whose adapter has learned something."""
    drafter = tiny_drafter() if drafter is None else drafter
    lora.attach(drafter, settings, seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.trained():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return drafter


def test_a_fresh_adapter_changes_nothing_and_trains_little():
    drafter = tiny_drafter()
    wanted, before = scores(drafter), dict(drafter.named_parameters())
    lora.attach(drafter, SETTINGS, seed=3)
    assert torch.equal(scores(drafter), wanted)
    names = {name for name, p in drafter.named_parameters() if any(p is q for q in drafter.trained())}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name} == set(TARGETS)
    assert {name for name in names if ".lora_" not in name} == {"mask_embedding"}
    kept = {id(p) for p in drafter.parameters()}
    assert all(id(p) in kept for p in before.values()), "the base's own tensors"
    other = tiny_drafter()
    lora.attach(other, SETTINGS, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(drafter.trained(), other.trained(), strict=True))


def test_training_moves_the_adapter_and_the_mask_embedding_alone(tmp_path):
    base = dict(tiny_drafter().named_parameters())
    found = work(Job(folder=tmp_path, changed={"lora": SETTINGS}))["weights"]
    moved = {name for name, w in found.items() if not torch.equal(w, base.get(name.replace(".base_layer", ""), w * 0))}
    assert moved == {name for name in found if lora.trains(name)}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_merged_it_says_the_same_and_the_base_stays(kind):
    drafter = tiny_drafter(kind)
    base = {name: (p, p.detach().clone()) for name, p in drafter.named_parameters() if name != "mask_embedding"}
    plain = scores(drafter)
    wanted = scores(adapted(drafter=drafter))
    assert float((wanted - plain).abs().max()) > 0.1
    with lora.exported(drafter, Lora(rank=3, alpha=6.0, targets=TARGETS, merge=True)):
        assert not lora.attached(drafter)
        torch.testing.assert_close(scores(drafter), wanted, rtol=0, atol=1e-4)
    assert torch.equal(scores(drafter), wanted), "as it was"
    assert lora.attached(drafter)
    lora.merge(drafter)
    assert not lora.attached(drafter)
    torch.testing.assert_close(scores(drafter), wanted, rtol=0, atol=1e-4)
    assert dict(drafter.named_parameters()).keys() == dict(tiny_drafter(kind).named_parameters()).keys()
    assert all(torch.equal(p, copy) for p, copy in base.values())


def test_two_adapters_share_their_base(tmp_path):
    base, wanted = tiny_drafter(), {}
    plain = scores(base)
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        made = adapted(seed)
        wanted[seed] = scores(made)
        lora.save(tmp_path / str(seed), made)
    found = {seed: lora.over(base, tmp_path / str(seed)) for seed in wanted}
    for seed, drafter in found.items():
        assert torch.equal(scores(drafter), wanted[seed])
        own = {name: p for name, p in drafter.named_parameters() if not lora.trains(name)}
        assert len(own) == len(list(base.parameters())) - 1
        for name, p in own.items():
            assert p.data_ptr() == base.get_parameter(name.replace(".base_layer", "")).data_ptr(), name
    assert torch.equal(scores(base), plain), "the base is still there by itself"
    lora.merge(found[1])
    assert torch.equal(scores(found[2]), wanted[2])
    assert torch.equal(scores(base), plain)


def loaded(folder, drafter, *, packed):
    return load_drafter(
        folder, embedding=drafter.body.embed_tokens, tokenizer="t", config=CONFIG, dtype=torch.float32, packed=packed
    )[0]


def test_a_drafters_folder_with_an_adapter(tmp_path):
    """Written, it is the same in other processes and of the same bytes; read to be trained on, and to decode."""
    drafter, files = adapted(), []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_drafter(tmp_path / name, drafter, card_of(drafter, "t"))
        files.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {
        *("config.json", "drafter.json", "model.safetensors"),
        *("adapter_config.json", "adapter_model.safetensors", "mask_embedding.safetensors"),
    }
    written = json.loads(files[0]["adapter_config.json"])
    assert written["target_modules"] == sorted(TARGETS)
    base = load_file(tmp_path / "a" / "model.safetensors")
    assert {name for name in base if name not in ("d2t", "t2d")} == {
        name for name in tiny_drafter().state_dict() if not name.startswith("body.embed_tokens")
    }
    assert torch.equal(scores(loaded(tmp_path / "a", drafter, packed=False)), scores(drafter))
    decoding = loaded(tmp_path / "a", drafter, packed=True)
    assert not lora.attached(decoding)
    torch.testing.assert_close(scores(decoding), scores(drafter), rtol=0, atol=1e-4)


def test_peft_itself_reads_the_adapter(tmp_path):
    """Over the plain causal LM that the drafter was cut from, all layers and words kept: q_1 is then its own law."""
    from peft import PeftModel

    drafter = adapted(settings=Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"), merge=False))
    lora.save(tmp_path, drafter)
    plain = causal_lm(copy=77)
    model = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0, -1, : drafter.vocab_size]
    torch.testing.assert_close(scores(drafter, window=1)[0], wanted, rtol=0, atol=1e-4)
    causal_lm.cache_clear()


def test_whole_weights_are_written_where_the_section_merges(tmp_path):
    drafter = adapted()
    wanted = scores(drafter)
    t = settings(Job(folder=tmp_path, changed={"lora": Lora(rank=3, alpha=6.0, targets=TARGETS, merge=True)}))
    training.write(tmp_path / "out", drafter, card_of(drafter, "t"), t)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "drafter.json", "model.safetensors"]
    torch.testing.assert_close(scores(loaded(tmp_path / "out", drafter, packed=False)), wanted, rtol=0, atol=1e-4)


def test_what_a_section_makes_of_the_drafter_it_starts_from():
    """An adapter is trained on; without `lora` it is merged; another one than it has is refused."""
    drafter = adapted()
    wanted, own = scores(drafter), drafter.trained()
    lora.ready(drafter, SETTINGS, seed=9)
    assert all(a is b for a, b in zip(drafter.trained(), own, strict=True))
    assert torch.equal(scores(drafter), wanted)
    with pytest.raises(ParamError, match=r"has an adapter of rank 3, alpha 6, targets \['down_proj', .*write these"):
        lora.ready(drafter, Lora(rank=4, alpha=6.0, targets=TARGETS, merge=False), seed=9)
    lora.ready(drafter, None, seed=9)
    assert not lora.attached(drafter)
    torch.testing.assert_close(scores(drafter), wanted, rtol=0, atol=1e-4)
    assert len(drafter.trained()) == len(tiny_drafter().trained())
    lora.ready(drafter, SETTINGS, seed=9)
    assert lora.attached(drafter)


def test_wrong_targets_and_other_drafters_adapters_are_named(tmp_path):
    with pytest.raises(ParamError, match=r"no linear layer 'qproj'; there are \['down_proj', .*'v_proj'\]"):
        lora.attach(tiny_drafter(), Lora(rank=2, alpha=1.0, targets=("qproj",), merge=False), seed=0)
    with pytest.raises(ValueError, match=r"targets: \[\]; name linear layers, each once"):
        Lora(rank=2, alpha=1.0, targets=(), merge=False)
    lora.save(tmp_path, adapted())
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: the adapter of another drafter"):
        lora.load(tiny_drafter(layers=[1]), tmp_path)
