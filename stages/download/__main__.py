"""`python -m stages.download <profile> <what>`: models, corpus, or one of the benchmarks.

Each target imports its own code only, so that an edit of the decoder reruns the corpus but not the
conversion of a model.
"""

import sys

from stages.common import entry, store
from stages.common.params import keys_at, load
from stages.download.params import Benchmark, Corpus, Guard, Magpie, Models


def targets(profile: str) -> list[str]:
    return ["models", "corpus", *keys_at(profile, "download", "benchmarks")]


def main(run: entry.Run) -> None:
    if run.what == "models":
        made = _models(run)
    elif run.what == "corpus":
        made = _corpus(run)
    else:
        made = _benchmark(run)
    print(f"{run.profile} {run.what}: {made}", file=sys.stderr)


def _models(run: entry.Run) -> str:
    from stages.download.models import make_drafter, make_verifier

    params = load(Models, run.profile, "models")
    made = [make_verifier(run.profile, params.verifier)]
    if params.drafter is not None:
        made.append(make_drafter(run.profile, params.drafter))
    return ", ".join(map(str, made))


def _corpus(run: entry.Run) -> dict[str, int]:
    from stages.common.models import load_tokenizer, resolve_dtype
    from stages.download.corpus import make_corpus
    from stages.download.items import Item
    from stages.download.magpie import from_magpie

    device, folder = run.device(), store.verifier_folder(run.profile)
    entry.set_threads(device.threads)

    def magpie(source: Magpie) -> list[Item]:
        dtype = resolve_dtype(device.dtype, device.name)
        return from_magpie(source, folder=folder, dtype=dtype, device=device.name)

    return make_corpus(
        run.profile,
        load(Corpus, run.profile, "download", "corpus"),
        held_out=load(tuple[int, ...], run.profile, "download", "held_out_templates"),
        seed=load(int, "seed"),
        encode=load_tokenizer(folder).encode_prompt,
        magpie=magpie,
    )


def _benchmark(run: entry.Run) -> dict[str, int]:
    from stages.common.models import load_tokenizer
    from stages.download.benchmarks import make_benchmark

    return make_benchmark(
        run.profile,
        run.what,
        load(Benchmark, run.profile, "download", "benchmarks", run.what),
        limits=load(Guard, run.profile, "download", "guard"),
        held_out=load(tuple[int, ...], run.profile, "download", "held_out_templates"),
        seed=load(int, "seed"),
        encode=load_tokenizer(store.verifier_folder(run.profile)).encode_prompt,
    )


if __name__ == "__main__":
    entry.run(main, compute=False, what=targets)
