"""The signals that detectors read equal the formulas of their papers, computed one token at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch

import millstream as ms
from millstream.core.batches import fetch_batch
from millstream.report.measures import auroc
from millstream.traces.detectors.attention_pool import softmax_within
from millstream.traces.detectors.icr import IcrFeature, icr
from millstream.traces.detectors.mil import bag_scores, roughness
from millstream.traces.detectors.toha import Toha
from millstream.traces.detectors.token_transformer import MAX_TOKENS, chosen_tokens
from millstream.traces.detectors.wepr import EntropyByRank
from millstream.training.task import FitResources
from support.making_traces import labelled, make_traces


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ms.Collection:
    return labelled(make_traces(tmp_path_factory.mktemp("formulas") / "t", num=60, tier="full"))


def made(records: ms.Collection, feature: object, numbers: range) -> dict[str, np.ndarray]:
    return dict(feature(fetch_batch(records, np.array(numbers, np.int64), feature.fields)))  # pyright: ignore


def test_wepr_is_the_mean_and_the_maximum_of_contributions_to_the_entropy(full: ms.Collection):
    found = made(full, EntropyByRank(), range(10))["contributions"]
    for row, number in zip(found, range(10), strict=True):
        trace = full[number]
        tokens = [[-np.exp(lp) * lp for lp in top[:15]] for top in trace["topk_logprobs"][: trace["answer_len"]]]
        assert row == pytest.approx(np.r_[np.mean(tokens, axis=0), np.max(tokens, axis=0)], rel=1e-4, abs=1e-6)


def naive_icr(trace: dict) -> list[float]:
    hidden, attention = trace["hidden"].astype(np.float64), trace["attention"].astype(np.float64)
    start, found = trace["prompt_len"], []
    for layer in range(len(attention)):
        scores = []
        for token in range(start, start + trace["answer_len"]):
            mean = attention[layer, :, token].mean(axis=0)
            top = [j for j in np.argsort(-mean, kind="stable")[:8] if mean[j] > 0]
            update = hidden[layer + 1, token] - hidden[layer, token]
            projected = np.array([update @ hidden[layer, j] / np.linalg.norm(hidden[layer, j]) for j in top])
            p, q = (np.exp((v - v.mean()) / v.std(ddof=1)) for v in (projected, mean[top]))
            p, q = p / p.sum(), q / q.sum()
            middle = (p + q) / 2
            scores.append(((p * np.log(p / middle)).sum() + (q * np.log(q / middle)).sum()) / 2)
        found.append(float(np.mean(scores)))
    return found


def test_icr_is_the_divergence_of_attention_and_projected_updates(full: ms.Collection):
    found = made(full, IcrFeature(True), range(8))["icr"]
    for row, number in zip(found, range(8), strict=True):
        assert row == pytest.approx(naive_icr(full[number]), rel=2e-3, abs=1e-4)


def write_updates(path: Path, num: int) -> ms.Collection:
    """Updates of right answers point to what is attended to most; those of wrong answers anywhere."""
    rng = np.random.default_rng(0)
    prompt, answer, dim, layers = 6, 2, 64, 2
    schema = {"hidden": "float16[layer,token,dim]", "attention": "float16[layer,head,query,key]"}
    schema |= {"nodes": "float16[layer,token,dim]", "edge_source": "int16[layer,token,edge]"}
    schema |= {"edge_weight": "float16[layer,token,edge]"}
    mix = np.linalg.qr(rng.normal(size=(dim, dim)))[0]  # a projection that keeps inner products
    with ms.TraceWriter(path, schema=schema) as writer:
        for number in range(num):
            size, wrong = prompt + answer, int(rng.random() < 0.5)
            weights = np.tril(rng.random((layers, 1, size, size)) ** 4, -1) + np.eye(size) * 0.01
            weights /= weights.sum(axis=-1, keepdims=True)
            hidden = rng.normal(size=(layers + 1, size, dim))
            for layer in range(layers):
                pull = rng.random((size, size)) if wrong else weights[layer, 0]
                hidden[layer + 1] = hidden[layer] + 5 * pull @ hidden[layer]
            earlier = np.tril(weights.mean(axis=1), -1)
            source = np.argsort(-earlier, axis=-1, kind="stable")
            weight = np.take_along_axis(earlier, source, axis=-1)
            tensors = {"hidden": hidden, "attention": weights, "nodes": hidden @ mix, "edge_weight": weight}
            about = {"question_id": str(number), "prompt_len": prompt, "answer_len": answer, "label": wrong}
            found = {name: np.asarray(value, np.float16) for name, value in tensors.items()}
            writer.append({**about, **found, "edge_source": np.where(weight > 0, source, -1).astype(np.int16)})
    return ms.open(path)


def test_icr_learns_whether_updates_follow_attention_from_hidden_states_and_from_nodes(tmp_path: Path):
    records = write_updates(tmp_path / "s", 160)
    scores = []
    for names in (records.field_names, [name for name in records.field_names if name != "attention"]):
        for memory in (100_000_000, 400_000):
            detector = icr(FitResources(memory=memory), names)
            detector.fit(records.subset(range(80)), records.subset(range(80, 110)))
            scores.append(detector.score(records.subset(range(110, 160))))
            assert auroc(records.subset(range(110, 160)).column("label").to_numpy(), scores[-1]) > 0.9
    assert np.corrcoef(scores[0], scores[1])[0, 1] > 0.98  # however much memory
    assert np.corrcoef(scores[0], scores[2])[0, 1] > 0.7  # nodes are about as good


def test_toha_averages_the_heads_with_the_largest_gap(full: ms.Collection):
    detector = Toha(FitResources(batch_size=7))
    detector.fit(full.subset(range(40)), full.subset(range(40, 60)))
    topology = np.stack([full[number]["topology"].reshape(-1) for number in range(60)]).astype(np.float64)
    labels = full.column("label").to_numpy()
    gap = topology[:40][labels[:40] == 1].mean(0) - topology[:40][labels[:40] == 0].mean(0)
    heads = np.argsort(-gap)[: len(detector.arrays["heads"])]
    assert heads.tolist() == detector.arrays["heads"].tolist()
    assert detector.chosen["heads"] == [[head // 2, head % 2] for head in heads.tolist()]
    np.testing.assert_allclose(detector.score(full), topology[:, heads].mean(1), rtol=1e-5)
    ranked = np.argsort(-gap)
    counts = range(1, min(10, len(ranked)) + 1)
    by_count = [auroc(labels[40:], topology[40:, ranked[:count]].mean(1)) for count in counts]
    assert len(heads) == int(np.argmax(by_count)) + 1


def test_the_score_of_a_bag_is_the_mean_of_its_highest_tokens():
    rng = np.random.default_rng(0)
    sizes = (1, 3, 9, 10, 25)
    bags = [rng.random((size, 2)).astype(np.float32) for size in sizes]
    padded = torch.full((5, 25, 2), float("nan"))
    for row, bag in enumerate(bags):
        padded[row, : len(bag)] = torch.from_numpy(bag)
    expected = [np.sort(bag, axis=0)[::-1][: len(bag) // 10 + 1].mean(axis=0) for bag in bags]
    np.testing.assert_allclose(bag_scores(padded), expected, rtol=1e-6)
    jumps = [(np.diff(bag, axis=0) ** 2).sum(axis=0) * (len(bag) > 8) for bag in bags]
    np.testing.assert_allclose(roughness(padded), jumps, rtol=1e-5)


def test_attention_within_records_is_softmax_and_long_answers_are_read_at_even_steps():
    torch.manual_seed(0)
    values, sizes = torch.randn(9, 2), [4, 0, 5]
    found = softmax_within(values, torch.tensor([0] * 4 + [2] * 5), 3)
    for ours, theirs in zip(found.split(sizes), values.split(sizes), strict=True):
        torch.testing.assert_close(ours, theirs.softmax(0))
    rows, is_token = chosen_tokens(torch.tensor([3, 0, 100]))
    assert rows.shape == (3, MAX_TOKENS) and is_token.sum(1).tolist() == [3, 0, MAX_TOKENS]
    assert rows[0, :3].tolist() == [0, 1, 2]
    assert rows[2].tolist() == (3 + np.round(np.linspace(0, 99, MAX_TOKENS))).tolist()
