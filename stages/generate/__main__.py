"""Answer one question on the terminal, drafted tokens in another colour than the verifier's own.

    python -m stages.generate --profile cpu "How many legs do three spiders have?"

A front end to the evaluate stage's engine, and the one package that imports another stage. Ends with the acceptance
length and the speed-up over vanilla steps timed within the same text. Reads what `dvc repro` made; writes nothing.
"""

import argparse
import sys

from stages.common import entry, spread
from stages.common.params import keys_at, load, profiles
from stages.evaluate import harness
from stages.evaluate.contract import Sampling, Text
from stages.evaluate.engine import Engine
from stages.evaluate.harness import Prompt, Shared
from stages.evaluate.parts import drafter_device, load_models, method_drafter, method_module

DRAFTED, OWN, PLAIN = "\033[32m", "\033[33m", "\033[0m"


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    device = load(entry.Device, args.profile, "device")
    entry.set_threads(device.threads)
    shared = load(Shared, args.profile, "evaluate", "shared")
    module = method_module(args.method)
    spread.refuse_ranks(device.placement, "a terminal")
    verifier, tokenizer = load_models(args.profile, device)
    drafter, _ = method_drafter(args.profile, args.method, verifier, tokenizer, device)
    method = module.build(load(module.Params, args.profile, "evaluate", args.method), drafter)
    settings = Sampling(temperature=shared.temperature, top_k=shared.top_k, top_p=shared.top_p, seed=load(int, "seed"))
    limit = shared.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    engine = Engine(verifier, settings, max_new_tokens=limit, drafter_device=drafter_device(device))
    prompt = Prompt(id=args.question, split="", ids=tuple(tokenizer.encode_prompt([args.question])))
    harness.warm_up(engine, method, prompt, shared)

    colours = sys.stdout.isatty() or args.colour
    text, laps, shown = Text(list(prompt.ids)), list[float](), ""
    for tokens in harness.paired(engine, method, prompt, shared, text, laps):
        drafted = text.cycles[-1].accepted if text.cycles else 0
        before = len(text.output_ids) - len(tokens)
        for index in range(len(tokens)):
            # The whole text is decoded each time: a word may take several tokens, and a character too.
            whole = tokenizer.decode(text.output_ids[: before + index + 1]).removesuffix("\ufffd")
            word, shown = whole[len(shown) :], whole if len(whole) > len(shown) else shown
            sys.stdout.write(f"{DRAFTED if index < drafted else OWN}{word}{PLAIN}" if colours else word)
        sys.stdout.flush()
    print("\n" + summary(text, laps, args.method, colours=colours))


def summary(text: Text, laps: list[float], method: str, *, colours: bool) -> str:
    """One line: what was accepted, and how fast against vanilla steps of the same text."""
    decoded = len(text.output_ids) - 1
    if not text.cycles or not laps or decoded < 1:
        return f"{method}: {len(text.output_ids)} token(s), nothing to measure"
    length = 1 + sum(cycle.accepted for cycle in text.cycles) / len(text.cycles)
    speed, yardstick = decoded / text.decode_s, len(laps) / sum(laps)
    legend = f"{DRAFTED}accepted draft{PLAIN}, {OWN}verifier{PLAIN}; " if colours else ""
    return (
        f"{legend}{method}: {len(text.output_ids)} tokens, acceptance length {length:.2f}, {speed:.1f} tokens/s "
        f"against {yardstick:.1f} of vanilla: {speed / yardstick:.2f}x"
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.generate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--profile", default="cpu", choices=profiles())
    parser.add_argument("--method", default="specdiff2_tree", choices=["vanilla", *keys_at("methods")])
    parser.add_argument("--max-new-tokens", type=int, default=None, help="default: the profile's")
    parser.add_argument("--colour", action="store_true", help="colours even where the output is no terminal")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
