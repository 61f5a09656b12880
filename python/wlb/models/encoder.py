"""Encoders of images: a transformer over the patches of an image, and the projection of its rows to tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import check_bool, check_integer, error, numbers
from wlb._shown import explained
from wlb.models.blocks import Matrix
from wlb.models.layers import Layer


@explained
@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """The shape of a vision transformer, and of the projection of its rows to tokens of a language model.

    Args:
        hidden_size: width of its residual stream.
        layers: their attention is `Attention` with a bidirectional mask: over the whole image (of a video, over
            each frame), or over square windows of patches.
        patch_values: numbers in a patch: channels x frames x height x width.
        patch_bias: the embedding of patches has a bias.
        extra_positions: rows of an image that are no patch, such as CLIP's class token; they are not passed on.
        merge: patches that become one token of the language model.
        projection: matrices that each of these tokens is multiplied by.
        other_parameters: all further parameters: positions, norms, an unused head.

    Raises:
        WlbError: naming the first value that makes no sense.
    """

    hidden_size: int
    layers: tuple[Layer, ...]
    patch_values: int
    patch_bias: bool = True
    extra_positions: int = 0
    merge: int = 1
    projection: tuple[Matrix, ...] = ()
    other_parameters: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "patch_values", "merge"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("extra_positions", "other_parameters"):
            check_integer(name, getattr(self, name), minimum=0)
        check_bool("patch_bias", self.patch_bias)
        for index, layer in enumerate(self.layers):
            kinds = {mask.kind for mask in layer.pairs()}
            if not kinds <= {"bidirectional", "bidirectional_window"}:
                raise error("layers", f"has masks {sorted(kinds)}: must be bidirectional", index=index, value=layer)

    @property
    def num_parameters(self) -> int:
        """All of them, the projection included."""
        embedding = Matrix(self.patch_values, self.hidden_size, self.patch_bias).parameters(1)
        layers = sum(layer.parameters(self.hidden_size) for layer in self.layers)
        return embedding + layers + sum(m.parameters(1) for m in self.projection) + self.other_parameters

    def flops(self, grids: ArrayLike) -> NDArray[np.float64]:
        """Model FLOPs of training on each image, as MFU counts them: three times those of its forward.

        Args:
            grids: int[n, 3] patches of each image or video: frames, rows, columns.

        Returns:
            float64[n].

        Raises:
            WlbError: a grid makes no sense; names it.

        Complexity:
            O(n * kinds of masks).
        """
        grid = numbers("grids", grids)
        if grid.ndim != 2 or grid.shape[1] != 3:
            raise error("grids", f"has shape {grid.shape}: must be [n, 3]: frames, rows, columns", value=grid.shape)
        wrong = np.flatnonzero((grid < 1).any(axis=1))
        if wrong.size:
            index = int(wrong[0])
            raise error("grids", f"= {grid[index].tolist()}: must be at least 1", index=index, value=grid[index])
        frames, rows, columns = grid.astype(np.float64).T
        patches = frames * rows * columns
        positions = rows * columns + self.extra_positions
        total = frames * positions * sum(layer.token_flops(self.hidden_size) for layer in self.layers)
        total = total + patches * 2 * self.patch_values * self.hidden_size
        total = total + patches / self.merge * sum(2 * m.rows * m.columns for m in self.projection)
        for layer in self.layers:
            for mask, flops in layer.pairs().items():
                if mask.kind == "bidirectional":
                    total = total + frames * positions**2 * flops
                else:
                    side = math.isqrt(mask.size)
                    total = total + frames * _squares(rows, side) * _squares(columns, side) * flops
        return np.asarray(3 * total)


def _squares(extent: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    """Sum of the squares of the pieces into which windows of this side cut a side of an image."""
    rest = extent % side
    return np.asarray((extent - rest) / side * side**2 + rest**2)
