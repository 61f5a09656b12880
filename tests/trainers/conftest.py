"""One thread for torch in the test process, as in tests/torch."""

import torch

torch.set_num_threads(1)
