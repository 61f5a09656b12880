"""One thread for torch in the test process too: two that wait for each other on a busy machine take minutes."""

import torch

torch.set_num_threads(1)
