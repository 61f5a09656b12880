"""One thread for torch in the test process too: two that wait for each other on a busy machine take minutes."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # No reader lets more wait than the packer's bounds allow.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("error::wlb.BacklogWarning"), append=False)
