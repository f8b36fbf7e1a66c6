"""What is kept of a forward pass equals what plain transformers shows of the same tokens, alone and unpadded."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millstream.traces.llm.capture import NAME, TAP, trace_attention
from millstream.traces.llm.fields import NODE_DIM, NUM_EDGES, NUM_EIGENVALUES, TOP_K
from millstream.traces.llm.topology import divergence, grown
from support.extras import need
from support.slow_reference import Seen, look
from support.tiny_models import KINDS, QUESTIONS, TinyModels, generated, load, make_tracer

need("transformers")

CLOSE = {"rtol": 0, "atol": 1e-5}  # float32, and no hidden state here reaches 10
WAYS = [(kind, beams, size) for kind in KINDS for beams in (1, 3) for size in (1, 5) if size == 5 or kind in KINDS[:4]]
Pairs = list[tuple[dict[str, Any], Seen]]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}beams-batch{way[2]}")
def pairs(request: pytest.FixtureRequest, tiny: TinyModels) -> Pairs:
    """A record of each question, and what the slow reference saw of its tokens."""
    kind, beams, size = request.param
    records: Any = tiny.traced(kind, beams, size)
    expected = tiny.expected(kind, beams)
    assert [generated(record) for record in records] == [ids for ids, _ in expected]
    return [(record, seen) for record, (_, seen) in zip(records, expected, strict=True)]


# -- every field


def test_hidden_is_the_embedding_and_the_raw_output_of_every_layer(pairs: Pairs):
    for record, seen in pairs:
        assert seen.hidden.abs().max() < 10
        torch.testing.assert_close(record["hidden"], seen.hidden, **CLOSE)


def test_answer_hidden_is_hidden_without_the_prompt(pairs: Pairs):
    for record, _ in pairs:
        assert torch.equal(record["answer_hidden"], record["hidden"][:, record["prompt_len"] :])


def test_post_norm_is_the_input_of_the_lm_head(pairs: Pairs):
    for record, seen in pairs:
        torch.testing.assert_close(record["post_norm"], seen.post_norm, **CLOSE)


def test_attention_covers_every_head_prompt_and_answer(pairs: Pairs):
    for record, seen in pairs:
        torch.testing.assert_close(record["attention"], seen.attention, **CLOSE)


def test_statistics_of_generated_tokens_are_those_of_the_full_distribution(pairs: Pairs):
    for record, seen in pairs:
        ids = torch.tensor(generated(record))
        logprobs = seen.logits[record["prompt_len"] - 1 : -1].log_softmax(-1)
        own = logprobs[torch.arange(len(ids)), ids]
        torch.testing.assert_close(record["logprobs"], own, **CLOSE)
        torch.testing.assert_close(record["entropy"], -(logprobs.exp() * logprobs).sum(-1), **CLOSE)
        assert record["rank"].tolist() == [int((row > mine).sum()) for row, mine in zip(logprobs, own, strict=True)]
        torch.testing.assert_close(record["topk_logprobs"], logprobs.sort(descending=True).values[:, :TOP_K], **CLOSE)
        named = logprobs.gather(1, record["topk_ids"].long())
        torch.testing.assert_close(record["topk_logprobs"], named, **CLOSE)


# -- reduced where it was seen


def test_nodes_are_one_fixed_projection_of_hidden_states(pairs: Pairs):
    for record, seen in pairs:
        dim = seen.hidden.shape[-1]
        matrix = torch.randn(dim, NODE_DIM, generator=torch.Generator().manual_seed(20170505)) / dim**0.5
        torch.testing.assert_close(record["nodes"], seen.hidden @ matrix, **CLOSE)


def test_states_are_at_the_last_prompt_token_and_first_last_and_mean_of_the_answer(pairs: Pairs):
    for record, seen in pairs:
        first = record["prompt_len"]
        answer = seen.hidden[:, first : first + record["answer_len"]]
        expected = torch.stack([seen.hidden[:, first - 1], answer[:, 0], answer[:, -1], answer.mean(1)], dim=1)
        torch.testing.assert_close(record["states"], expected, **CLOSE)


def test_edges_are_the_strongest_earlier_tokens_in_the_mean_over_heads(pairs: Pairs):
    for record, seen in pairs:
        mean = seen.attention.mean(1)
        weights = torch.zeros(*mean.shape[:2], NUM_EDGES)
        for token in range(1, mean.shape[1]):
            best = mean[:, token, :token].sort(descending=True).values[:, :NUM_EDGES]
            weights[:, token, : best.shape[1]] = best
        torch.testing.assert_close(record["edge_weight"], weights, **CLOSE)
        torch.testing.assert_close(record["edge_rest"], 1 - weights.sum(-1), **CLOSE)


def test_edge_sources_are_positions_in_the_unpadded_sequence_or_minus_one(pairs: Pairs):
    for record, seen in pairs:
        mean, source = seen.attention.mean(1), record["edge_source"]
        assert source.dtype == torch.int16
        for layer in range(source.shape[0]):
            for token, row in enumerate(source[layer].tolist()):
                there = [place for place in row if place >= 0]
                attended = int((mean[layer, token, :token] > 0).sum())  # a sliding window hides some
                assert len(set(there)) == len(there) == min(NUM_EDGES, attended)
                assert row == there + [-1] * (NUM_EDGES - len(there)) and all(place < token for place in there)
                named = mean[layer, token, there]
                torch.testing.assert_close(record["edge_weight"][layer, token, : len(there)], named, **CLOSE)


def test_edges_of_answer_rows_have_the_attention_of_every_head(pairs: Pairs):
    for record, seen in pairs:
        prompt = record["prompt_len"]
        source = record["edge_source"][:, prompt - 1 :].long()
        rows = seen.attention[:, :, prompt - 1 :]
        expected = rows.gather(3, source.clamp(min=0)[:, None].expand(-1, rows.shape[1], -1, -1)).transpose(1, 2)
        torch.testing.assert_close(record["edge_heads"], expected * (source >= 0)[:, :, None], **CLOSE)
        torch.testing.assert_close(record["edge_heads"].mean(2), record["edge_weight"][:, prompt - 1 :], **CLOSE)


def test_topology_is_the_length_of_the_spanning_tree_from_the_prompt_through_the_answer(pairs: Pairs):
    from scipy.sparse.csgraph import minimum_spanning_tree

    for record, seen in pairs:
        prompt, found = record["prompt_len"], record["topology"]
        for layer, head in np.ndindex(*found.shape):
            attention = seen.attention[layer, head, prompt:].double()
            far = 1 - torch.cat([attention[:, :prompt].amax(1, keepdim=True), attention[:, prompt:].tril(-1)], dim=1)
            graph = torch.zeros(far.shape[0] + 1, far.shape[1])
            graph[1:] = far.where(torch.ones_like(far).tril(0) > 0, 0.0)  # 0 is no edge to scipy
            length = minimum_spanning_tree(graph.numpy()).sum() / len(far)
            assert float(found[layer, head]) == pytest.approx(length, abs=1e-5)


def test_heads_are_summarised_from_the_last_prompt_token_onwards(pairs: Pairs):
    for record, seen in pairs:
        prompt = record["prompt_len"]
        rows = seen.attention[:, :, prompt - 1 :]
        own = seen.attention.diagonal(dim1=2, dim2=3)[..., prompt - 1 :]
        torch.testing.assert_close(record["self_attention"], own, **CLOSE)
        entropy = -(rows * rows.clamp_min(1e-30).log()).sum(-1)
        torch.testing.assert_close(record["attention_entropy"], entropy, **CLOSE)
        torch.testing.assert_close(record["prompt_attention"], rows[..., :prompt].sum(-1), **CLOSE)


def test_laplacian_contains_the_largest_eigenvalues_of_every_head(pairs: Pairs):
    for record, seen in pairs:
        num_tokens = seen.attention.shape[-1]
        received = torch.stack([seen.attention[..., j:, j].mean(-1) for j in range(num_tokens)], dim=-1)
        eigenvalues = (received - seen.attention.diagonal(dim1=2, dim2=3)).sort(descending=True).values
        expected = torch.zeros(*eigenvalues.shape[:2], NUM_EIGENVALUES)
        expected[..., : min(num_tokens, NUM_EIGENVALUES)] = eigenvalues[..., :NUM_EIGENVALUES]
        torch.testing.assert_close(record["laplacian"], expected, **CLOSE)


def test_logdet_is_the_mean_log_self_attention(pairs: Pairs):
    for record, seen in pairs:
        expected = seen.attention.diagonal(dim1=2, dim2=3).log().mean(-1)
        torch.testing.assert_close(record["attention_logdet"], expected, **CLOSE)


def test_the_eigenvalues_are_those_of_the_laplacian_matrix(tiny: TinyModels):
    record: Any = tiny.traced("llama", 1, 5)[2]
    attention = record["attention"][0, 0].double()
    num_tokens = len(attention)
    degree = attention.sum(0) / torch.arange(num_tokens, 0, -1)
    eigenvalues = torch.linalg.eigvals(torch.diag(degree) - attention).real.sort(descending=True).values
    torch.testing.assert_close(record["laplacian"][0, 0, :num_tokens].double(), eigenvalues[:NUM_EIGENVALUES], **CLOSE)


# -- which fields, which layers, which numbers


@pytest.mark.parametrize(
    "name",
    [
        *("answer_hidden", "attention", "edges", "edges,edge_heads", "heads", "hidden", "laplacian", "nodes"),
        *("post_norm", "states", "topology"),
    ],
)
def test_each_field_is_the_same_alone_and_with_the_others(tiny: TinyModels, name: str):
    tracer = make_tracer(tiny.loaded("llama"), fields=name)
    together: Any = tiny.traced("llama", 1, 5)
    for record, other in zip(tracer.trace(tracer.encode(QUESTIONS)), together, strict=True):
        assert record["status"] == "ok"
        for field in tracer.fields.schema():
            torch.testing.assert_close(record[field], other[field], **CLOSE)


def test_chosen_layers_are_stored_in_the_order_of_layers(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="hidden[-1,0],attention[2,1]")
    together: Any = tiny.traced("llama", 1, 5)
    for record, other in zip(tracer.trace(tracer.encode(QUESTIONS)), together, strict=True):
        torch.testing.assert_close(record["hidden"], other["hidden"][[0, 3]], **CLOSE)
        torch.testing.assert_close(record["attention"], other["attention"][[1, 2]], **CLOSE)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_values_are_the_float32_values_rounded_once(tiny: TinyModels, stored: str):
    tracer = make_tracer(tiny.loaded("gpt2"), stored=stored)
    together: Any = tiny.traced("gpt2", 1, 5)
    for record, other in zip(tracer.trace(tracer.encode(QUESTIONS)), together, strict=True):
        for field, kind in tracer.fields.schema().items():
            if other[field] is None:  # given_logprobs
                continue
            expected = other[field].to(getattr(torch, kind.dtype))
            assert torch.equal(record[field], expected), field  # pyright: ignore


def test_a_prompt_of_one_token_has_a_trace_like_any_other(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"))
    encoded = tracer.encode([replace(QUESTIONS[0], question="?")])
    record: Any = tracer.trace(encoded)[0]
    seen = look(tiny.eager("llama"), record["tokens"].tolist())
    assert record["prompt_len"] == 1
    for name in ("hidden", "post_norm", "attention"):
        torch.testing.assert_close(record[name], getattr(seen, name), **CLOSE)


# -- traps


def test_the_last_hidden_state_is_raw_and_the_final_norm_makes_post_norm_of_it(tiny: TinyModels):
    norm = tiny.eager("llama").model.norm
    for record in tiny.traced("llama", 1, 5):
        last: Any = record["hidden"][-1]  # pyright: ignore
        with torch.no_grad():
            torch.testing.assert_close(record["post_norm"], norm(last), **CLOSE)
        assert (last - record["post_norm"]).abs().max() > 0.1


def test_sdpa_computes_attention_that_is_not_captured(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    from transformers.integrations import sdpa_attention

    calls: list[int] = []
    forward = sdpa_attention.sdpa_attention_forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", counted)
    loaded = tiny.loaded("llama")
    tracer = make_tracer(loaded)
    assert loaded.model.config._attn_implementation == NAME
    prompt = tiny.prompts()[1]
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([prompt])).logits[0]
    assert len(calls) == 3  # one for each layer
    assert not tracer._capture.wants_attention and not tracer._capture.kept
    torch.testing.assert_close(logits, look(tiny.eager("llama"), prompt).logits, **CLOSE)
    calls.clear()
    assert tracer.trace(tracer.encode(QUESTIONS))[0]["attention"] is not None
    assert len(calls) == 3 * 5  # between the prompt and the replay: all steps but the first, which the prompt gives


def test_a_tracer_of_hidden_states_never_computes_attention_weights(tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="hidden,states,nodes,post_norm")
    taken: list[object] = []
    tracer._capture.take_attention = lambda *args: taken.append(args)  # type: ignore[method-assign]
    tracer.trace(tracer.encode(QUESTIONS))
    assert not taken


def test_rows_without_a_mask_are_the_last_ones_and_attention_is_causal():
    taken: list[torch.Tensor] = []
    module = torch.nn.Module()
    setattr(module, TAP, SimpleNamespace(wanted=True, take=taken.append))
    query, key, value = (torch.randn(1, 2, count, 4, generator=torch.Generator().manual_seed(0)) for count in (3, 5, 5))
    output, _ = trace_attention(module, query, key, value, None, scaling=1.0)
    hidden = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = (query @ key.transpose(2, 3)).masked_fill(hidden, float("-inf")).softmax(-1)
    torch.testing.assert_close(taken[0], expected, **CLOSE)
    torch.testing.assert_close(output, (expected @ value).transpose(1, 2), **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_without_its_mask_function_left_padding_would_be_attended_to(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str
):
    from transformers import AttentionMaskInterface

    loaded = load(tiny.folder(kind))
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, NAME)
    tracer = make_tracer(loaded, fields="hidden", max_new_tokens=1)
    records: Any = tracer.trace(tracer.encode(QUESTIONS))
    expected = tiny.expected(kind, 1)
    lengths = [record["prompt_len"] for record in records]
    wrong = [
        bool((record["hidden"][:, : length - 1] - seen.hidden[:, : length - 1]).abs().max() > 1e-3)
        for record, (_, seen), length in zip(records, expected, lengths, strict=True)
    ]
    assert wrong == [length < max(lengths) for length in lengths]


@pytest.mark.parametrize("stored", ["float16", "float32"])
def test_captured_values_do_not_keep_the_activations_of_a_layer_alive(stored: str, tiny: TinyModels):
    tracer = make_tracer(tiny.loaded("llama"), fields="heads,laplacian,edges,nodes,states", stored=stored)
    encoded = tracer.encode(QUESTIONS)
    prompts = tracer.loaded.padded([one.ids for one in encoded])
    with torch.inference_mode():
        tracer._passes.prefill(prompts, prompts.prompt - 1, cache=tracer._passes.new_cache(), chunk=16)
    capture = tracer._capture
    kept = [part for parts in capture.kept.values() for part in parts]
    kept += [*capture._received.values(), *capture._diagonal.values()]
    assert len(kept) > 10
    for tensor in kept:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_two_tracers_of_one_model_both_capture(tiny: TinyModels):
    loaded = load(tiny.folder("llama"))
    first, second = make_tracer(loaded, fields="attention"), make_tracer(loaded, fields="edges")
    encoded = first.encode(QUESTIONS[:2])
    assert all(record["status"] == "ok" for tracer in (first, second, first) for record in tracer.trace(encoded))


def test_the_topology_of_a_long_answer_that_comes_in_several_passes_is_that_of_one_pass():
    attention = torch.rand(2, 3, 40, 50, generator=torch.Generator().manual_seed(0)) ** 8
    attention = attention.round(decimals=1).tril(10)  # many equal lengths
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, 33:] = False  # a shorter answer, padded
    whole = grown(None, attention, real, prompt=10)
    tree = None
    for start, end in ((0, 16), (16, 17), (17, 40)):
        tree = grown(tree, attention[:, :, start:end, : 10 + end], real[:, start:end], prompt=10)
    assert tree is not None
    torch.testing.assert_close(divergence(tree, real), divergence(whole, real))
    alone = grown(None, attention[1:, :, :33, :43], real[1:, :33], prompt=10)
    torch.testing.assert_close(divergence(whole, real)[1:], divergence(alone, real[1:, :33]))
