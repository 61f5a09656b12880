"""The example with two resources: both level, and nothing learnt otherwise."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from examples import vision_language as example  # noqa: E402


def test_both_resources_are_level_and_gradients_are_those_of_one_document_at_a_time() -> None:
    torch.manual_seed(0)
    model = example.VisionLanguage()
    batch = example.documents(128, seed=3)
    packing, by_sum = example.plan(batch, 8)
    assert packing.step_cost <= 1.02 * packing.lower_bound < by_sum.step_cost
    heaviest = packing.column_costs.max(axis=0) / packing.column_costs.mean(axis=0)
    assert np.all(heaviest < 1.03)

    tokens = sum(len(document.text) - 1 for document in batch)
    alone = sum(model([document]) for document in batch) / tokens
    alone.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = example.train_step(model, batch, packing)
    np.testing.assert_allclose(loss, float(alone.detach()), rtol=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
