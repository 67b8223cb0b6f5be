"""README.md of an exported drafter: what it is, what it is made from, how well it is accepted, whose terms bind it."""

import json
import re
from pathlib import Path
from typing import Any

from stages.common import store
from stages.common.hub import local_folder
from stages.export.forms import Form


def text(profile: str, name: str, folder: Path, form: Form, facts: dict[str, Any]) -> str:
    """Markdown. `facts`: of the gate (acceptance.json)."""
    sidecar = store.read_json(folder / "drafter.json")
    model, licence = verifier(profile)
    stamp = facts["stamp"]
    return f"""# {name}

A drafter for speculative decoding, of kind `{sidecar["kind"]}`, {sidecar["parameters"]:,} trained numbers.
It proposes tokens; its verifier checks them and keeps its own output distribution, so the drafter changes speed and
never the text.

- **Verifier:** {model}. The ids are its tokenizer's.
- **Objective:** `{sidecar["objective"]}`, {sidecar["provenance"].get("steps", "?")} steps.
- **Acceptance length:** {facts["acceptance_length"]:.2f} tokens a pass of the verifier, over {facts["prompts"]}
  benchmark prompts that no training has seen; method `{facts["method"]}` with the settings of profile `{profile}`
  ({stamp["device"]}, {stamp["dtype"]}, torch {stamp["torch"]}, transformers {stamp["transformers"]}).

The folder was read back before it was kept: every draft, and what was accepted of it, was the trained drafter's.

## Loading

{form.loads}

{form.servers}

## Data

The verifier's own continuations of these prompts (hashes below):

{data(profile)}

## Licences

This drafter derives from its verifier, whose licence ({licence}) and terms of use
bind it too, and it learned from the prompts above, each under the terms of its source. Whoever publishes this folder
checks both and writes the outcome here.

## Provenance

    {sidecar["provenance"].get("command", "?")}
    {json.dumps(sidecar["provenance"].get("sha256", {}), sort_keys=True)}
"""


def verifier(profile: str) -> tuple[str, str]:
    """What the verifier is, and its licence as its own card states it."""
    folder = store.verifier_folder(profile)
    manifest = folder / "hub.json"
    name = f"the model of `{profile}.models.verifier`"
    if manifest.exists():
        found = store.read_json(manifest)
        name = f"`{found['repo']}` at revision `{found['revision']}`"
    own_card = local_folder(folder) / "README.md"
    front = own_card.read_text(encoding="utf-8").split("---")[1:2] if own_card.exists() else []
    stated = re.search(r"^license(?:_name)?:\s*(\S+)", front[0], re.MULTILINE) if front else None
    return name, f"`{stated[1]}`" if stated else "not stated in its folder; see where it comes from"


def data(profile: str) -> str:
    """The corpus's parts with their sources, one a line."""
    parts = store.read_provenance(store.corpus_file(profile))["params"]["parts"]
    lines = []
    for name, part in sorted(parts.items()):
        source = ", ".join(
            f"{key} {value}" for key, value in part["source"].items() if not isinstance(value, dict | list)
        )
        lines.append(f"- `{name}`: {source}")
    return "\n".join(lines)
