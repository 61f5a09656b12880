//! `wlb.KernelModel`.

use pyo3::prelude::*;
use wlb_core::Lengths;
use wlb_core::cost::Mask;
use wlb_core::sharding::kernel::KernelModel as Model;

use crate::arguments;
use crate::convert::{choice, profile};
use crate::cost::mask;
use crate::error::raise;
use crate::plain::{Array, hashed_by, pickled_as_json};

/// Latency of an attention kernel for the segments of a context-parallel rank, in seconds per transformer layer.
///
/// A kernel computes whole tiles of queries. Their FLOPs are divided by the rate at this query length and key length,
/// from a table that was measured (``from_profile``) or assumed (``analytic``); docs/semantics.md has the formulas.
/// Immutable and picklable; equal models compare equal. WLB-LLM, section 5.2.
///
/// Examples:
///     >>> import wlb
///     >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
///     >>> kernel.source
///     'analytic: h100'
///     >>> s = wlb.shard([100, 20_000], cp_size=4, strategy="adaptive", kernel_model=kernel)
///     >>> s.strategy
///     'per_sequence'
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct KernelModel(pub(crate) Model);

hashed_by!(KernelModel: |kernel| kernel.0.to_json());
pickled_as_json!(KernelModel(Model));

#[pymethods]
impl KernelModel {
    /// Source of the numbers: "measured: (GPU) (kernel)" or "analytic: (generation)".
    #[getter]
    fn source(&self) -> &str {
        &self.0.description().source
    }

    /// Whether queries attend only to keys before them.
    #[getter]
    fn causal(&self) -> bool {
        self.0.mask() == Mask::Causal
    }

    /// Query heads on one GPU.
    #[getter]
    fn num_heads(&self) -> i64 {
        self.0.description().num_heads
    }

    /// Key and value heads on one GPU, as measured.
    #[getter]
    fn num_kv_heads(&self) -> i64 {
        self.0.description().num_kv_heads
    }

    /// Width of a head.
    #[getter]
    fn head_dim(&self) -> i64 {
        self.0.description().head_dim
    }

    /// Queries that a thread block computes at a time, forward and backward; a segment takes whole tiles.
    #[getter]
    fn tiles(&self) -> (i64, i64) {
        (self.0.description().forward.tile, self.0.description().backward.tile)
    }
}

#[pymethods]
impl KernelModel {
    fn __repr__(&self) -> String {
        let (heads, head_dim) = (self.num_heads(), self.head_dim());
        format!(
            "KernelModel({:?}, num_heads={heads}, head_dim={head_dim}, causal={})",
            self.source(),
            self.0.description().causal
        )
    }
}

#[pymethods]
impl KernelModel {
    /// The model of a measured profile; exact at every point of its grid.
    ///
    /// Args:
    ///     path_or_name: path of a ``.json`` file, or a name in ``wlb.profiles.names()``.
    ///     num_heads: query heads on one GPU if not the profile's: times are proportional to it.
    ///
    /// Raises:
    ///     WlbError: no such profile, or a malformed one; the message says where in the file.
    #[staticmethod]
    #[pyo3(signature = (path_or_name, *, num_heads = None))]
    fn from_profile(
        path_or_name: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::optional::num_heads)] num_heads: Option<i64>,
    ) -> PyResult<Self> {
        let json = profile(path_or_name)?;
        let model = Model::from_profile(&json).map_err(raise)?;
        num_heads.map_or(Ok(model.clone()), |heads| model.with_num_heads(heads)).map(Self).map_err(raise)
    }

    /// The documented assumptions for a GPU that was not measured; ``source`` says that it is an assumption.
    ///
    /// Args:
    ///     generation: "a100", "h100", "h200", "b200", "h20", "l40s" or "mi300x", in lower or upper case.
    ///     num_heads: query heads on one GPU.
    ///     num_kv_heads: key/value heads on one GPU; must divide ``num_heads``, which is the default. Does not change
    ///         times.
    ///     head_dim: width of a head.
    ///     causal: whether queries see only keys before them.
    ///
    /// Raises:
    ///     WlbError: an unknown generation, or a size out of range.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128).source
    ///     'analytic: h100'
    #[staticmethod]
    #[pyo3(signature = (generation, *, num_heads, num_kv_heads = None, head_dim, causal = true))]
    fn analytic(
        generation: &str,
        #[pyo3(from_py_with = arguments::num_heads)] num_heads: i64,
        #[pyo3(from_py_with = arguments::optional::num_kv_heads)] num_kv_heads: Option<i64>,
        #[pyo3(from_py_with = arguments::head_dim)] head_dim: i64,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
    ) -> PyResult<Self> {
        let num_kv_heads = num_kv_heads.unwrap_or(num_heads);
        Model::analytic(choice(&generation.to_lowercase())?, num_heads, num_kv_heads, head_dim, mask(causal))
            .map(Self)
            .map_err(raise)
    }

    /// Latency of segments, one by one, in a call that fills the GPU.
    ///
    /// Args:
    ///     query_lengths: int[n], tokens of each segment.
    ///     key_lengths: int[n], keys that the last token of each segment sees; at least its tokens.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Returns:
    ///     float64[n], seconds.
    ///
    /// Raises:
    ///     WlbError: a length out of range, or more queries than keys.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
    ///     >>> one, both = kernel.segment_seconds([1024, 2048], [1024, 2048])
    ///     >>> bool(2 * one < both)
    ///     True
    #[pyo3(signature = (query_lengths, key_lengths, *, passes = "forward_backward"))]
    fn segment_seconds(
        &self,
        #[pyo3(from_py_with = arguments::query_lengths)] query_lengths: Lengths,
        #[pyo3(from_py_with = arguments::key_lengths)] key_lengths: Lengths,
        passes: &str,
    ) -> PyResult<Array<Vec<f64>>> {
        let seconds = self.0.segments_seconds(&query_lengths, &key_lengths, choice(passes)?);
        seconds.map(Array).map_err(raise)
    }
}
