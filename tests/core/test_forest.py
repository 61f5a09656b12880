"""Prefix forests from Python: what arrays they take, what they say of themselves, what is refused and by which name.

That every shared token is there once, and plans are near the best: `rust/wlb-core/tests/forest.rs`.
"""

import json
import pickle
from typing import Any

import numpy as np
import pytest

import wlb
from wlb._core import forest_edges

COST = wlb.CostModel(attention=1.0, linear=100.0)
TOKENS = [7, 8, 1, 7, 8, 2, 2, 7, 8]
OFFSETS = [0, 3, 7, 9]


def rollouts(prompts: int, each: int, seed: int = 0) -> wlb.PrefixForest:
    """Groups of completions, with lengths as reinforcement learning has them."""
    random = np.random.default_rng(seed)
    prompt_lengths = np.clip(random.lognormal(np.log(1500), 0.6, prompts), 1, 16384).astype(np.int64)
    completions = np.clip(random.lognormal(np.log(2000), 1.0, prompts * each), 1, 16384).astype(np.int64)
    return wlb.PrefixForest.from_prompts(prompt_lengths, each, completions)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.int8])
def test_tokens_of_any_integers_give_one_forest(dtype: Any) -> None:
    forest = wlb.PrefixForest.from_tokens(np.array(TOKENS, dtype), np.array(OFFSETS))
    assert forest == wlb.PrefixForest.from_tokens(TOKENS, OFFSETS)
    assert forest == wlb.PrefixForest.from_tokens(np.array([*TOKENS, 0], dtype)[:-1], OFFSETS)
    wide = np.array(TOKENS, np.int64) + 2**40
    assert forest == wlb.PrefixForest.from_tokens(wide, OFFSETS)
    strided = np.repeat(np.array(TOKENS, dtype), 2)[::2]
    assert forest == wlb.PrefixForest.from_tokens(strided, OFFSETS)


def test_arrow_arrays_are_read() -> None:
    pa = pytest.importorskip("pyarrow")
    lists = pa.array([[7, 8, 1], [7, 8, 2, 2], [7, 8]])
    assert wlb.PrefixForest.from_tokens(lists.values, lists.offsets) == wlb.PrefixForest.from_tokens(TOKENS, OFFSETS)


def test_structures_that_are_alike_are_equal_however_they_are_given() -> None:
    by_tokens = wlb.PrefixForest.from_tokens(TOKENS, OFFSETS)
    by_prompts = wlb.PrefixForest.from_prompts([2], [3], [1, 2, 0])
    by_parents = wlb.PrefixForest.from_parents(by_tokens.parents, by_tokens.lengths, by_tokens.ends)
    for forest in (by_prompts, by_parents, pickle.loads(pickle.dumps(by_tokens))):
        assert forest == by_tokens
        assert forest.digest() == by_tokens.digest()
        assert hash(forest) == hash(by_tokens)
    assert by_tokens != wlb.PrefixForest.from_tokens(TOKENS, OFFSETS, groups=[0, 0, 1])
    assert by_tokens.sample_lengths.tolist() == [3, 4, 2]
    assert (by_tokens.num_samples, by_tokens.num_nodes, by_tokens.starts.tolist()) == (3, 3, [0, 2, 2])


@pytest.mark.parametrize("name", ["groups", "key"])
def test_only_equal_groups_and_keys_share(name: str) -> None:
    apart: dict[str, Any] = {name: [4, 4, 9]}
    forest = wlb.PrefixForest.from_tokens(TOKENS, OFFSETS, **apart)
    assert (forest.unique_tokens, forest.raw_tokens) == (7, 9)
    assert forest.parents.tolist() == [-1, 0, 0, -1]


def test_tokens_are_shared_only_where_routes_agree() -> None:
    """Ids of (token, route), as the page has it: a shared id has one token and one route."""
    rng = np.random.default_rng(0)
    samples = [np.append([1, 2, 3, 4, 5, 6], rng.integers(0, 9, 4)) for _ in range(12)]
    routes = [np.where(np.arange(10) < rng.integers(1, 9), 0, rng.integers(0, 3, 10)) for _ in samples]
    tokens, offsets = np.concatenate(samples), np.arange(0, 121, 10)
    ids = np.unique(np.stack([tokens, np.concatenate(routes)]), axis=1, return_inverse=True)[1].ravel()
    forest = wlb.PrefixForest.from_tokens(ids, offsets)
    pairs = {
        tuple(zip(s[: n + 1].tolist(), r[: n + 1].tolist(), strict=True))
        for s, r in zip(samples, routes, strict=True)
        for n in range(10)
    }
    assert forest.unique_tokens == len(pairs) > wlb.PrefixForest.from_tokens(tokens, offsets).unique_tokens
    forest.check_tokens(tokens, offsets)


def test_a_parent_may_stand_behind_its_child() -> None:
    forest = wlb.PrefixForest.from_parents([2, 2, -1], [3, 4, 5], [0, 1])
    assert forest.sample_lengths.tolist() == [8, 9]
    assert forest.parents.tolist() == [2, 2, -1]


@pytest.mark.parametrize(
    ("arguments", "argument", "index", "message"),
    [
        (([1, 2], [0, 3]), "offsets", 1, "number of tokens"),
        (([1, 2], [0, 1]), "offsets", 1, "number of tokens"),
        (([1, 2], [1, 2]), "offsets", 0, "must be 0"),
        (([1, 2], [0, 2, 1]), "offsets", 2, "not be below"),
        (([1, 2], [0, 1, 1, 2]), "offsets", 2, "at least one token"),
        (([1, 2], []), "offsets", None, "one entry more"),
        (([1, 2], [0]), "offsets", 0, "without samples"),
        (([1, 2], [0, 2], [1, 2]), "groups", None, "2 entries"),
        (([1, 2], [0, 2], None, [1, 2]), "key", None, "2 entries"),
        (([1.5, 2], [0, 2]), "tokens", 0, "integer"),
        (([[1, 2]], [0, 2]), "tokens", None, "1-dimensional"),
    ],
)
def test_tokens_that_make_no_samples_are_refused(
    arguments: Any, argument: str, index: int | None, message: str
) -> None:
    with pytest.raises(wlb.WlbError, match=message) as caught:
        wlb.PrefixForest.from_tokens(*arguments)
    assert (caught.value.argument, caught.value.index) == (argument, index)


@pytest.mark.parametrize(
    ("arguments", "argument", "index", "message"),
    [
        (([0, 2, 1], [1, 1, 1], [0, 2]), "parents", 0, "circle"),
        (([-1, 2, 1], [1, 1, 1], [0, 2]), "parents", 1, "circle"),
        (([-1, 3], [1, 1], [1]), "parents", 1, "must be a node"),
        (([-1, -2], [1, 1], [1]), "parents", 1, "must be a node"),
        (([-1, 0], [1, 1], [2]), "ends", 0, "must be a node"),
        (([-1, 0], [1, 1], [0]), "parents", 1, "no sample ends"),
        (([-1, 0], [1, 0], [1]), "lengths", 1, "from 1"),
        (([-1, 0], [1], [1]), "lengths", None, "1 entries"),
        (([-1, 0], [2**31 - 1, 1], [1]), "lengths", 1, "path"),
    ],
)
def test_nodes_that_make_no_forest_are_refused(arguments: Any, argument: str, index: int | None, message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message) as caught:
        wlb.PrefixForest.from_parents(*arguments)
    assert (caught.value.argument, caught.value.index) == (argument, index)


@pytest.mark.parametrize(
    ("arguments", "argument", "index"),
    [
        (([5, 5], [1], [1]), "samples_per_prompt", None),
        (([5], 0, []), "samples_per_prompt", 0),
        (([5], 2, [1]), "completion_lengths", None),
        (([5], 2, [1, -1]), "completion_lengths", 1),
        (([0], 1, [1]), "prompt_lengths", 0),
        (([5], 1, [2**31 - 5]), "completion_lengths", 0),
    ],
)
def test_prompts_that_do_not_fit_are_refused(arguments: Any, argument: str, index: int | None) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        wlb.PrefixForest.from_prompts(*arguments)
    assert (caught.value.argument, caught.value.index) == (argument, index)


def test_prompts_that_differ_inside_a_group_are_named() -> None:
    forest = wlb.PrefixForest.from_prompts([2], 2, [1, 2])
    forest.check_tokens([7, 8, 1, 7, 8, 2, 2], [0, 3, 7])
    with pytest.raises(wlb.WlbError, match="token 1 of sample 1 is 8 in sample 0") as caught:
        forest.check_tokens([7, 8, 1, 7, 9, 2, 2], [0, 3, 7])
    assert (caught.value.argument, caught.value.index, caught.value.value) == ("tokens", 4, 9)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_the_faces_of_a_plan_agree(sync: Any) -> None:
    forest = rollouts(12, 8)
    plan = wlb.pack(
        forest, num_micro_batches=None, max_tokens=32768, cost_model=COST, dp_size=4, sync=sync, multiple_of_tokens=128
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(plan) == plan.num_micro_batches == len(plan.micro_batches) == len(list(plan))
    assert plan.forest == forest
    assert plan.raw_tokens == forest.raw_tokens > plan.num_tokens >= forest.unique_tokens
    assert sorted(np.concatenate([batch.document_ids for batch in plan])) == list(range(forest.num_samples))
    assert sorted(np.unique(plan.assignment)) == list(range(len(plan)))
    assert plan.tokens.tolist() == [batch.tokens for batch in plan]
    assert (plan.padded_tokens % 128 == 0).all()
    assert ((plan.tokens <= plan.padded_tokens) & (plan.padded_tokens <= plan.max_tokens)).all()
    assert plan.summary()["raw_tokens"] == plan.raw_tokens
    for number, (batch, cost) in enumerate(zip(plan, plan.costs, strict=True)):
        own = batch.forest
        assert own.num_samples == len(batch) == len(batch.document_ids)
        assert own.unique_tokens == batch.tokens == forest.lengths[batch.nodes].sum() <= plan.max_tokens
        assert own.raw_tokens == batch.raw_tokens == forest.sample_lengths[batch.document_ids].sum()
        np.testing.assert_array_equal(batch.lengths, forest.sample_lengths[batch.document_ids])
        assert not batch.starts.any()
        assert (plan.assignment[batch.document_ids] == number).all()
        with pytest.raises(wlb.WlbError, match="share tokens"):
            _ = batch.cu_seqlens
        assert batch.cost == cost
        assert pickle.loads(pickle.dumps(batch)) == batch
        # A node continues its parent in memory, or begins behind it.
        assert all(own.parents < np.arange(own.num_nodes))
    dealt = plan.deal(4)
    assert dealt.shape == (4, len(plan) // 4)
    of_ranks = plan.costs[dealt]
    step = of_ranks.sum(1).max() if sync == "step" else of_ranks.max(0).sum()
    assert plan.step_cost == pytest.approx(step, rel=1e-12)
    assert plan.rank_imbalance == pytest.approx(step / (plan.costs.sum() / 4), rel=1e-12)
    assert plan.imbalance == pytest.approx(plan.costs.max() / plan.costs.mean(), rel=1e-12)
    assert plan.lower_bound <= plan.step_cost
    assert (plan.dp_size, plan.sync) == (4, sync)
    with pytest.raises(wlb.WlbError, match="another number of ranks"):
        plan.deal(2)


@pytest.mark.parametrize("thing", ["forest", "plan", "micro-batch"])
def test_representations_are_short(thing: str) -> None:
    forest = rollouts(64, 16)
    plan = wlb.pack(forest, num_micro_batches=None, max_tokens=65536, cost_model=COST)
    shown = repr({"forest": forest, "plan": plan, "micro-batch": plan[0]}[thing])
    assert len(shown) <= 400
    assert "raw_tokens=" in shown


@pytest.mark.parametrize("seed", range(3))
def test_rollouts_are_level_and_hardly_anything_is_computed_twice(seed: int) -> None:
    """The inputs on which TRL 1.16 computes 2 % more than the least, and steps take 1.28 of the mean."""
    forest = rollouts(64, 8, seed)
    plan = wlb.pack(forest, num_micro_batches=None, max_tokens=32768, cost_model=COST, dp_size=8)
    assert plan.step_cost <= 1.02 * plan.lower_bound
    assert plan.num_tokens <= 1.02 * least_tokens(forest, 32768)


def least_tokens(forest: wlb.PrefixForest, max_tokens: int) -> int:
    """Unique tokens of any plan: a tree that is too large lies in several micro-batches, each with its prompt."""
    unique = forest.unique_tokens
    parents, lengths = forest.parents, forest.lengths
    for root in np.flatnonzero(parents < 0):
        prompt, rest = int(lengths[root]), int(lengths[parents == root].sum())
        if rest:
            unique += (max(1, -(-rest // (max_tokens - prompt))) - 1) * prompt
    return unique


def test_where_nothing_is_shared_the_plan_is_that_of_documents() -> None:
    lengths = rollouts(64, 1).sample_lengths
    forest = wlb.PrefixForest.from_parents([-1] * 64, lengths, range(64))
    options: dict[str, Any] = {"max_tokens": 40000, "cost_model": COST, "multiple_of_tokens": 32}
    for more in (
        {"dp_size": 4},
        {"dp_size": 2, "sync": "micro_batch", "equal_documents": True},
        {"max_documents": 9},
        {},
    ):
        plan = wlb.pack(forest, num_micro_batches=None, **options, **more)
        packing = wlb.pack(lengths, num_micro_batches=None, **options, **more)
        assert plan.digest() == packing.digest()
        np.testing.assert_array_equal(plan.costs, packing.costs)


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"max_tokens": 4000}, "samples", "max_tokens = 4000"),
        ({"cost_model": wlb.CostModel(attention=1.0, linear=1.0, causal=False)}, "cost_model", "full mask"),
        ({"groups": [0] * 96}, "groups", "dp_size"),
        ({"groups": [0], "dp_size": 2}, "groups", "96"),
        ({"sync": "step"}, "sync", "dp_size"),
        ({"equal_documents": True}, "equal_documents", "dp_size"),
        ({"num_micro_batches": 3, "dp_size": 2}, "dp_size", "divide"),
        ({"num_micro_batches": 1}, "num_micro_batches", "fits all samples"),
        ({"cost_model": None}, "cost_model", "is missing"),
        ({"costs": [1.0] * 96}, "costs", "cost_model"),
        ({"limits": [1.0]}, "limits", "forest"),
        ({"method": "refined"}, "method", "leave it out"),
        ({"global_batches": 2}, "global_batches", "one global batch"),
        ({"multiple_of": 2}, "multiple_of", "dp_size"),
        ({"together": "micro_batch", "groups": [0] * 96}, "together", "on one rank"),
        ({"token_buckets": [40000]}, "token_buckets", "multiple_of_tokens"),
        ({"leftover": "return"}, "leftover", "are placed"),
        ({"equal_documents": True, "dp_size": 2, "groups": [0] * 95 + [1]}, "equal_documents", "groups"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], argument: str, message: str) -> None:
    options: dict[str, Any] = {"num_micro_batches": None, "max_tokens": 40000, "cost_model": COST}
    with pytest.raises(wlb.WlbError, match=message) as caught:
        wlb.pack(rollouts(12, 8), **{**options, **change})
    assert caught.value.argument == argument


def test_fewest_micro_batches_are_as_few_as_hold_the_samples() -> None:
    forest = rollouts(12, 8)
    options: dict[str, Any] = {"max_tokens": 40000, "cost_model": COST, "dp_size": 4}
    fewest = wlb.pack(forest, num_micro_batches="fewest", **options)
    assert len(fewest) <= len(wlb.pack(forest, num_micro_batches=None, **options))
    with pytest.raises(wlb.WlbError, match="fits all samples"):
        wlb.pack(forest, num_micro_batches=len(fewest) - 4, **options)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_the_step_of_documents_is_bounded_as_ranks_wait(sync: Any) -> None:
    lengths = rollouts(64, 1).sample_lengths
    plan = wlb.pack(lengths, num_micro_batches=16, max_tokens=40000, cost_model=COST, dp_size=4, sync=sync)
    of_ranks = plan.costs[plan.deal(4)]
    step = of_ranks.sum(1).max() if sync == "step" else of_ranks.max(0).sum()
    assert plan.step_cost == pytest.approx(step, rel=1e-12)
    assert plan.costs.sum() / 4 * (1 - 1e-12) <= plan.lower_bound <= plan.step_cost
    assert pickle.loads(pickle.dumps(plan)).lower_bound == plan.lower_bound


@pytest.mark.parametrize("cp_size", [1, 3])
def test_a_micro_batch_is_sharded_as_what_it_holds(cp_size: int) -> None:
    forest = rollouts(12, 8)
    plan = wlb.pack(forest, num_micro_batches=None, max_tokens=32768, cost_model=COST)
    shard = wlb.shard(plan[0], cp_size=cp_size)
    assert shard == wlb.shard(plan[0].forest, cp_size=cp_size) == pickle.loads(pickle.dumps(shard))
    assert (shard.forest, shard.causal, shard.strategy) == (plan[0].forest, True, "auto")
    assert shard.lengths.tolist() == plan[0].forest.lengths.tolist()
    for rank in range(cp_size):
        held = shard.rank(rank)
        assert held.forest == shard.forest
        keys = np.add.reduceat(np.append(held.key_ends - held.key_starts, 0), held.cu_intervals[:-1])
        np.testing.assert_array_equal(np.diff(held.cu_seqlens_k), keys)
        with pytest.raises(wlb.WlbError, match="shard of a forest"):
            _ = held.k_starts
    packing = wlb.pack(forest.sample_lengths, num_micro_batches=None, max_tokens=32768, cost_model=COST)
    of_documents = wlb.shard(packing[0], cp_size=cp_size)
    assert of_documents == wlb.shard(packing[0].lengths, cp_size=cp_size)
    assert of_documents.forest is packing.forest is packing[0].forest is packing[0].nodes is packing.raw_tokens is None
    held = of_documents.rank(0)
    np.testing.assert_array_equal(held.key_starts, held.k_starts)
    np.testing.assert_array_equal(held.key_ends - held.key_starts, np.diff(held.cu_seqlens_k))
    assert held.cu_intervals.tolist() == list(range(held.num_segments + 1))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"strategy": "per_document"}, "strategy"),
        ({"causal": False}, "causal"),
        ({"strategy": "auto", "hybrid_threshold": 8}, "hybrid_threshold"),
        ({"kernel_model": wlb.KernelModel.analytic("h100", num_heads=8, head_dim=64)}, "kernel_model"),
        ({"cp_seconds_per_key": 1e-9}, "cp_seconds_per_key"),
        ({"max_imbalance": 0.5}, "max_imbalance"),
        ({"cp_size": 0}, "cp_size"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        wlb.shard(rollouts(2, 2), **{"cp_size": 2, **change})
    assert caught.value.argument == argument


def test_figures_of_documents_are_refused_for_a_forest() -> None:
    shard = wlb.shard(rollouts(2, 2), cp_size=2)
    assert shard.summary()["nodes"] == shard.lengths.size
    for name in ("tokens_split", "keys_picked"):
        with pytest.raises(wlb.WlbError, match="documents"):
            getattr(shard, name)


@pytest.mark.parametrize("change", ["sample twice", "tokens", "length"])
def test_a_changed_pickle_of_a_plan_is_refused(change: str) -> None:
    """A plan that went through a file holds each sample once, with the tokens of its nodes."""
    plan = wlb.pack(rollouts(3, 2), num_micro_batches=2, max_tokens=60000, cost_model=COST)
    make, (text,) = plan.__reduce__()
    written = json.loads(text)
    assert make(json.dumps(written)) == plan
    if change == "sample twice":
        written["pieces"][0] = written["pieces"][1]
    elif change == "tokens":
        written["tokens"][0] -= 1
    else:
        written["pieces"][0][2] -= 1
    with pytest.raises(wlb.WlbError):
        make(json.dumps(written))


def naive_edges(shard: wlb.Shard, rank: int, samples: list[list[int]], counts: list[list[bool]]) -> dict[str, Any]:
    """Rows and predictions of a rank, prediction by prediction, from the places of the samples' tokens."""
    assert shard.forest is not None
    places, at = shard.forest.token_indices.tolist(), 0
    paths = []
    for sample in samples:
        paths.append(places[at : at + len(sample)])
        at += len(sample)
    token_at = {
        place: token
        for path, sample in zip(paths, samples, strict=True)
        for place, token in zip(path, sample, strict=True)
    }
    held = shard.rank(rank).token_indices.tolist()
    learnt: dict[int, int] = {}  # for each predicted place the place before it
    for path, counted in zip(paths, counts, strict=True):
        for position in range(1, len(path)):
            if counted[position] and path[position - 1] in held:
                learnt[path[position]] = path[position - 1]
    edges = sorted(learnt)
    predictions = [
        (edges.index(place), sample, position)
        for sample, path in enumerate(paths)
        for position, place in enumerate(path)
        if counts[sample][position] and place in learnt
    ]
    return {
        "tokens": [token_at.get(place, 0) for place in held],
        "sample_counts": [sum(place in path for path in paths) for place in held],
        "edge_rows": [held.index(learnt[place]) for place in edges],
        "edge_targets": [token_at[place] for place in edges],
        "edge_weights": [sum(edge == at for edge, *_ in predictions) for at in range(len(edges))],
        "sample_edges": [edge for edge, *_ in predictions],
        "sample_of": [sample for _, sample, _ in predictions],
        "sample_positions": [position for *_, position in predictions],
    }


@pytest.mark.parametrize("seed", range(80))
def test_the_predictions_of_a_rank_are_those_of_its_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, 2, int(rng.integers(1, 12))).tolist() for _ in range(int(rng.integers(1, 9)))]
    counts = [[position > 0 and bool(rng.random() < 0.7) for position in range(len(each))] for each in samples]
    flat = np.array([token for each in samples for token in each])
    forest = wlb.PrefixForest.from_tokens(flat, np.cumsum([0, *map(len, samples)]))
    if padding := int(rng.integers(0, 3)):
        parents, lengths = np.append(forest.parents, -1), np.append(forest.lengths, padding)
        forest = wlb.PrefixForest.from_parents(parents, lengths, np.append(forest.ends, forest.num_nodes))
    shard = wlb.shard(forest, cp_size=int(rng.integers(1, 5)))
    mask = np.array([count for each in counts for count in each])
    for rank in range(shard.cp_size):
        found = forest_edges(shard, rank, tokens=flat, counts=mask)
        assert {name: values.tolist() for name, values in found.items()} == naive_edges(shard, rank, samples, counts)
        assert {values.dtype for values in found.values()} == {np.dtype(np.int64)}


def test_predictions_of_other_samples_are_refused() -> None:
    shard = wlb.shard(wlb.PrefixForest.from_prompts([2], 2, [1, 2]), cp_size=2)
    tokens, counts = np.arange(7), np.array([0, 1, 1, 0, 1, 1, 1], bool)
    forest_edges(shard, 0, tokens=tokens, counts=counts)
    for changes, argument in (
        ({"counts": ~counts}, "counts"),
        ({"counts": counts[1:]}, "counts"),
        ({"tokens": tokens[1:], "counts": counts[:-1]}, "tokens"),
    ):
        with pytest.raises(wlb.WlbError) as refused:
            forest_edges(shard, 0, **{"tokens": tokens, "counts": counts, **changes})
        assert refused.value.argument == argument
    with pytest.raises(wlb.WlbError, match="is of documents"):
        forest_edges(wlb.shard([7], cp_size=1), 0, tokens=tokens, counts=counts)
