"""Traces as a kind of record: the settings of their commands, how stores are opened. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from millstream.core.config import Count, Finite, Natural, NonNegative, Probability, Share, SizeInBytes, setting_pairs
from millstream.errors import BadSetting
from millstream.training import LoopSettings

if TYPE_CHECKING:
    from millstream.traces.store.traces import Traces

MODEL_GROUPS = ("baselines",)  # names that stand for several models
POSITIONS = ("last_prompt", "first_answer", "last_answer", "mean_answer")  # of the field `states`
THINKING = ("last_thinking", "mean_thinking")  # of `states` too, if answers begin after tokens of reasoning


def is_named(path: Path) -> bool:
    """A store can have any name."""
    return False


def is_at(path: Path) -> bool:
    """Whether a path is a trace store, or a file that can be imported into one."""
    from millstream.core.remote import is_url

    if is_url(path):  # few requests
        return (path / "manifest.json").is_file() or any(path.glob("shard-*.arrow"))
    if path.is_dir():
        return (path / "manifest.json").exists() or any(path.glob("shard-*.arrow*"))
    from millstream.traces.convert import importers

    return path.is_file() and any(importer.recognises(path) for importer in importers())


def open(
    path: str | Path | Sequence[str | Path],
    *,
    verify: Literal["always", "never"],
    open_shards: int,
    **_others: object,
) -> Traces:
    """`ms.open` for a trace store; ignores the options of other kinds."""
    from millstream.traces.store.traces import Traces

    if not isinstance(path, str | Path):
        raise BadSetting(f"{len(path)} paths given, but a trace store is one folder; join several with ms.concat")
    return Traces(path, verify=verify, open_shards=open_shards)


def files_at(path: Path) -> dict[str, Path]:
    """What `millstream copy` copies of a folder that cannot be listed, or of a file, by name."""
    from millstream.traces.store.manifest import files_of_store

    return {path.name: path} if path.is_file() else files_of_store(path)


def card(path: Path, *, url: Path, folder: str) -> str:
    """The dataset card of a store that is copied to a folder of a dataset on the hub."""
    from millstream.traces.store.card import make_card

    return make_card(path, url=url, folder=folder)


def expand_models(names: Sequence[str]) -> list[str]:
    """Each name once, with groups replaced by their models."""
    from millstream.traces.detectors import expanded

    return expanded(names)


@dataclass(frozen=True)
class ExtractSettings:
    """Settings of `millstream extract`."""

    model: Annotated[str, "name on the Hugging Face hub, folder, facts or smollm2"] = ""
    revision: Annotated[str | None, "branch, tag or commit of the model on the hub"] = None
    tier: Annotated[str, "how much of each trace to keep: stats, graph, probe, full, or answer[8,16] for layers"] = (
        "probe"
    )
    fields: Annotated[str | None, "fields to keep instead of a tier, such as hidden[8,16,24],edges"] = None
    dtype: Annotated[str, "number format of the model: float32, float16 or bfloat16"] = "auto"
    stored: Annotated[str, "number format on disk: float16, bfloat16 or float32"] = "float16"
    device: Annotated[str, "cpu, cuda, cuda:1, mps, or auto to use what is available"] = "auto"
    device_map: Annotated[str | None, "auto spreads the model over all GPUs (accelerate)"] = None
    quantize: Annotated[str | None, "load the model in 8bit or 4bit"] = None
    trust_remote_code: Annotated[bool, "run the Python code that comes with the model; it can do anything"] = False
    max_new_tokens: Annotated[Count, "maximum length of an answer"] = 32
    num_beams: Annotated[Count, "beam search; the best beam is the answer"] = 1
    samples: Annotated[Natural, "answers to draw per question at the temperature, besides the greedy one"] = 0
    sample_fields: Annotated[str, "what to keep of samples: logprobs (and texts) or all"] = "logprobs"
    temperature: Annotated[NonNegative, "sampling temperature; 0 is greedy decoding"] = 0.0
    top_k: Annotated[Count | None, "sample from the k most likely tokens"] = None
    top_p: Annotated[Probability | None, "nucleus sampling: probability mass of the tokens to sample from"] = None
    seed: Annotated[Natural, "sampling seed"] = 0
    prompt: Annotated[
        str, "plain, few-shot, chat, a text with {question} and {context}, a .txt file, or chat:TEXT for a chat"
    ] = "auto"
    system: Annotated[str | None, "system message of chats"] = None
    truncate: Annotated[bool, "cut a context that is too long for the model; else its question fails"] = False
    stop: Annotated[str | None, "strings that end an answer, separated by |"] = None
    answer_after: Annotated[str | None, "mark after which the answer starts, such as </think>"] = None
    answer_end: Annotated[str | None, "cut the answer after its first line or sentence"] = None
    endpoint: Annotated[str | None, "OpenAI-compatible server that answers, such as http://127.0.0.1:8000/v1"] = None
    endpoint_model: Annotated[str | None, "model of the endpoint; default: its only one"] = None
    key_env: Annotated[str | None, "environment variable with the key; default: OPENAI_API_KEY"] = None
    concurrency: Annotated[Count, "requests to the endpoint at once"] = 8
    p_true: Annotated[bool, "also compute P(True), with two more forward passes per answer"] = False
    columns: Annotated[str | None, "column names in the questions file, such as id=qid,question=text"] = None
    num_samples: Annotated[Count | None, "use only the first N questions"] = None
    shard_records: Annotated[Count | None, "maximum number of traces per shard"] = None
    shard_bytes: Annotated[SizeInBytes | None, "approximate size of a shard; default: 512MB"] = None
    memory: Annotated[SizeInBytes, "memory budget of a batch, in addition to the model"] = "2GB"


@dataclass(frozen=True)
class LabelSettings:
    """Settings of `millstream label`."""

    rule: Annotated[
        str,
        "default (printed when labelling), em, f1@0.5, rougeL@0.3, spans, given, scores (a file) or judge (a model)",
    ] = "default"
    scores: Annotated[str | None, "CSV or Parquet file with record_id or question_id, and scores"] = None
    column: Annotated[str | None, "column of the scores file, if it has several"] = None
    threshold: Annotated[Finite | None, "score that separates right from wrong answers; default: 0.5"] = None
    positive: Annotated[str | None, "scores: right or wrong, what a score at or above the threshold means"] = None
    references: Annotated[str | None, "questions file with correct answers, if the store has none or others"] = None
    columns: Annotated[str | None, "column names in the references file, such as id=qid,answer=gold"] = None
    spans: Annotated[str | None, "spans: file with ids and hallucinated characters; default: those of the traces"] = (
        None
    )
    endpoint: Annotated[str | None, "judge: OpenAI-compatible server, such as http://127.0.0.1:8000/v1"] = None
    model: Annotated[str | None, "judge: model of the endpoint, by default its only one; without one, a folder"] = None
    key_env: Annotated[str | None, "judge: environment variable with the key; default: OPENAI_API_KEY"] = None
    nli: Annotated[str | None, "samples: NLI model that finds equal answers; default: their words"] = None
    concurrency: Annotated[Count, "judge: requests to the endpoint at once"] = 8
    max_new_tokens: Annotated[Count, "judge: maximum length of a reply; a model that thinks needs more"] = 16


@dataclass(frozen=True)
class FeaturizeSettings:
    """Settings of `millstream featurize`."""

    feature: Annotated[str, "layers, graphs or fields"] = "layers"
    token: Annotated[
        str, "layers: position, one of first, last, mean, last_prompt, first_answer, mean_answer or a number"
    ] = "last"
    field: Annotated[str, "layers: field of the hidden states"] = "hidden"
    fields: Annotated[str | None, "fields: names, separated by commas"] = None
    k: Annotated[Count | None, "graphs: edges per token"] = 8
    threshold: Annotated[Probability, "graphs: minimum attention of an edge"] = 0.0
    dtype: Annotated[str, "number format on disk"] = "float16"
    shard_bytes: Annotated[SizeInBytes | None, "approximate size of a shard; default: 512MB"] = None
    memory: Annotated[SizeInBytes, "memory budget of the traces processed at a time"] = "1GB"


@dataclass(frozen=True)
class TrainSettings(LoopSettings):
    """One split and one recipe for all detectors of a run."""

    model: Annotated[str, "detectors to train and compare, separated by commas; your own: package.module:Class"] = (
        "stack,lstm,gnn,gvae,baselines"
    )
    data: Annotated[str, "labelled trace store"] = ""
    label: Annotated[str, "verdict (right or wrong), or a column with 0 and 1, such as em"] = "verdict"
    positive: Annotated[str | None, "right or wrong, what 1 means in a label column of your own"] = None
    train: Annotated[Share, "fraction of questions in the train split"] = 0.7
    val: Annotated[Share, "fraction of questions in the val split; the rest is the test split"] = 0.15
    folds: Annotated[Count | None, "cross-validation: every record is in the test split of one of so many folds"] = None
    curve: Annotated[
        str | None, "learning curve: also train with so many labelled questions, such as 100,300,1000,3000"
    ] = None
    by: Annotated[str, "field to group records by; a group is never split"] = "question_id"
    salt: Annotated[str, "any text; a different salt gives a different split"] = ""
    seeds: int = 3
    parameters: Annotated[Count, "parameters per model, which sets its width"] = 100_000
    token: Annotated[
        str,
        "position the LSTM reads: last_prompt, first_answer, last_answer, mean_answer, or last_thinking, mean_thinking",
    ] = "last_answer"
    token_stats: Annotated[bool, "also feed log-probabilities and other token statistics"] = True
    layers: Annotated[
        str | None, "token detectors: stored layers to read, such as 8,16,-1; default: up to 8, at even steps"
    ] = None
    k: Annotated[Count | None, "edges per token; none: all above the threshold"] = 8
    threshold: Annotated[Probability, "minimum attention of an edge"] = 0.0
    kl_weight: Annotated[NonNegative, "gvae: weight of the VAE loss"] = 0.1
    free_bits: Annotated[NonNegative, "gvae: free bits per latent dimension"] = 0.05

    def check(self) -> None:
        if not self.data:
            raise BadSetting("data= is missing: the trace store to train on, as in data=traces")
        if self.train + self.val >= 1:
            raise BadSetting(f"train={self.train} val={self.val}: their sum must be below 1 to leave a test split")
        if self.folds == 1:
            raise BadSetting("folds=1: must be at least 2")
        self.curve_points()
        check_positive(self.positive)
        super().check()

    def curve_points(self) -> list[int]:
        """The numbers of labelled questions of the learning curve, smallest first."""
        try:
            points = sorted({int(point) for point in (self.curve or "").split(",") if point.strip()})
        except ValueError:
            points = [0]
        if points and points[0] < 1:
            raise BadSetting(f"curve={self.curve}: must be numbers of questions, as in curve=100,300,1000")
        return points


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of `millstream evaluate`."""

    data: Annotated[str | None, "one labelled store, instead of an argument; default: the test split of the run"] = None
    model: Annotated[str | None, "detectors of the run, separated by commas; default: all"] = None
    include_seen: Annotated[bool, "also score questions that the run was trained or validated on"] = False
    memory: Annotated[SizeInBytes, "memory budget of the loader and the working data of a model"] = "2GB"
    out: Annotated[
        str | None, "folder to write, of one store; default: evaluated/ in the run, and the name of the store"
    ] = None


def check_positive(positive: str | None) -> None:
    if positive not in (None, "right", "wrong"):
        raise BadSetting(f"positive={positive}: must be one of right, wrong")


TRAIN_SETTINGS, TRAINS = TrainSettings, "hallucination detectors (data=STORE)"


def is_training_on(settings: Sequence[str] | Mapping[str, object]) -> bool:
    """Whether training settings are for this kind of record: `data` is one store."""
    return not any(key.startswith("data.") for key, _ in setting_pairs(settings))
