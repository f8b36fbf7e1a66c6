"""The settings of a command, read from the source of their dataclasses: help and completion do not wait for torch."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """One `name=value`; what stands beside it in the source says what it is about."""

    name: str
    default: str
    about: str
    is_flag: bool


@dataclass(frozen=True)
class Place:
    """Where settings are defined; those of an inner dataclass are called `prefix` and their name."""

    file: str
    kind: str
    prefix: str = ""

    def read(self) -> list[Setting]:
        source = (HERE / self.file).read_text()
        lines = source.splitlines()
        kind = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == self.kind)
        found: list[Setting] = []
        for node in kind.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if isinstance(node.value, ast.Call):  # an inner dataclass
                continue
            about = lines[(node.end_lineno or 0) - 1][node.end_col_offset or 0 :].partition("#")[2].strip()
            default = str(ast.literal_eval(node.value)) if isinstance(node.value, ast.Constant) else ""
            is_flag = ast.unparse(node.annotation) == "bool"
            default = default.lower() if is_flag else "" if default == "None" else default
            found.append(Setting(self.prefix + node.target.id, default, about, is_flag))
        return found


_LOOP = Place("train/settings.py", "LoopSettings")
_DETECTORS = Place("train/settings.py", "TrainSettings")
_READ_DATA = Place("train/read_settings.py", "ReadData", "data.")
_CLASSIFIERS = Place("train/read_settings.py", "ReadSettings")

SETTINGS: dict[str, dict[str, Sequence[Place]]] = {
    "extract": {"Settings": [Place("source/llm/settings.py", "ExtractSettings")]},
    "label": {"Settings": [Place("dataset/label.py", "LabelSettings")]},
    "featurize": {"Settings": [Place("dataset/featurize.py", "FeaturizeSettings")]},
    "train": {
        "Settings for detectors of wrong answers": [_DETECTORS],
        "Settings for classifiers of reads": [_READ_DATA, _CLASSIFIERS],
        "Settings for both": [_LOOP],
    },
    "evaluate": {"Settings": [Place("train/evaluate.py", "EvaluateSettings")]},
}


def groups_of(command: str) -> dict[str, list[Setting]]:
    """The settings of a command under their headings; one that stands in several of them stands in the first."""
    groups: dict[str, list[Setting]] = {}
    base = {setting.name: setting for setting in _LOOP.read()} if command == "train" else {}
    for heading, places in SETTINGS.get(command, {}).items():
        own = [_with_about(setting, base) for place in places for setting in place.read()]
        if places == [_LOOP]:  # kinds of training that have another default list it themselves
            told = [{setting.name for setting in settings} for settings in groups.values()]
            own = [setting for setting in own if not all(setting.name in names for names in told)]
        groups[heading] = own
    return groups


def _with_about(setting: Setting, base: dict[str, Setting]) -> Setting:
    """A setting that is there for another default is about what it was about before."""
    before = base.get(setting.name)
    return replace(setting, about=before.about) if before and not setting.about else setting


def names_of(command: str, given: Sequence[str]) -> dict[str, Setting]:
    """The settings that go with those given: data.train= is of reads, data= of traces."""
    groups = groups_of(command)
    if command == "train" and given:
        of_reads = any(text.startswith("data.") for text in given)
        if of_reads or any(text.startswith("data=") for text in given):
            del groups["Settings for " + ("detectors of wrong answers" if of_reads else "classifiers of reads")]
    return {setting.name: setting for settings in groups.values() for setting in settings}


def keys_of(file: str, name: str) -> list[str]:
    """The keys of a dictionary that a file defines, in its order."""
    for node in ast.parse((HERE / file).read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise KeyError(f"{file}: {name}")


def values_of(command: str, setting: Setting, given: Sequence[str]) -> list[str]:
    """What a setting may be, where there are only so many; nothing where it may be a file, a number, a text."""
    if setting.is_flag:
        return ["true", "false"]
    if setting.name == "model" and command in ("train", "evaluate"):
        detectors = [*keys_of("model/zoo.py", "NETS"), "baselines", *keys_of("model/baselines.py", "BASELINES")]
        classifiers = keys_of("model/read_zoo.py", "CLASSIFIERS")
        if command == "evaluate" or any(text.startswith("data=") for text in given):
            return detectors
        return (
            classifiers
            if any(text.startswith("data.") for text in given)
            else list(dict.fromkeys([*detectors, *classifiers]))
        )
    return _VALUES.get((command, setting.name), [])


_VALUES = {
    ("extract", "model"): ["facts", "smollm2"],
    ("extract", "tier"): ["stats", "graph", "probe", "full"],
    ("extract", "dtype"): ["auto", "float32", "float16", "bfloat16"],
    ("extract", "stored"): ["float16", "bfloat16", "float32"],
    ("extract", "quantize"): ["8bit", "4bit"],
    ("extract", "prompt"): ["auto", "plain", "few-shot", "chat"],
    ("label", "rule"): ["default", "em", "f1@0.5", "rougeL@0.3", "scores"],
    ("featurize", "feature"): ["layers", "graphs", "fields"],
    ("featurize", "token"): ["first", "last", "mean", "last_prompt", "first_answer", "mean_answer"],
    ("train", "token"): ["last_prompt", "first_answer", "last_answer", "mean_answer"],
    ("train", "balance"): ["weights", "sampling", "none"],
    ("train", "accelerator"): ["auto", "cpu", "cuda"],
    ("train", "precision"): ["auto", "32-true", "bf16-mixed", "16-mixed"],
}
