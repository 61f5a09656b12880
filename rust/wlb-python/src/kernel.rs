//! `wlb.KernelModel`.

use std::hash::{Hash, Hasher};

use numpy::PyArray1;
use pyo3::prelude::*;
use wlb_core::cost::{Mask, Passes};
use wlb_core::sharding::kernel::{Generation, KernelModel as Model};

use crate::convert::{Pickled, array, as_json, integer, read_lengths};
use crate::cost::mask;
use crate::error::raise;
use crate::profile::read_profile;
use crate::shard::Shard;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<KernelModel>()
}

/// Latency of an attention kernel for the segments of a context-parallel rank, in seconds per transformer layer.
///
/// Queries are padded to the kernel's tile; the padded FLOPs are divided by the rate at that (query length, key length), from a table
/// that was measured (:meth:`from_profile`) or is assumed (:meth:`analytic`); docs/semantics.md has the formulas. Immutable;
/// picklable; equal models compare equal. WLB-LLM, section 5.2.
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct KernelModel(pub(crate) Model);

impl Hash for KernelModel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_json().hash(state);
    }
}

#[pymethods]
impl KernelModel {
    /// The model of a measured profile; exact at every point of its grid.
    ///
    /// Args:
    ///     path_or_name: path of a ``.json`` file, or a name in ``wlb.profile.names()``.
    ///     num_heads: query heads of one GPU where they are others than the profile's: times are in proportion.
    ///
    /// Raises:
    ///     WlbError: no such profile, or a malformed one; says where in the file.
    #[staticmethod]
    #[pyo3(signature = (path_or_name, *, num_heads = None))]
    fn from_profile(path_or_name: &Bound<'_, PyAny>, num_heads: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let num_heads = num_heads.map(|heads| integer("num_heads", heads)).transpose()?;
        let json = read_profile(path_or_name)?;
        let model = Model::from_profile(&json).map_err(raise)?;
        num_heads.map_or(Ok(model.clone()), |heads| model.with_num_heads(heads)).map(Self).map_err(raise)
    }

    /// A documented default where nothing was measured: an assumption, and ``source`` says so.
    ///
    /// Args:
    ///     generation: "a100", "h100", "h200" or "b200".
    ///     num_heads: query heads of one GPU.
    ///     num_kv_heads: key/value heads of one GPU, which divide them; default ``num_heads``. Not used.
    ///     head_dim: width of a head.
    ///     causal: mask.
    ///
    /// Raises:
    ///     WlbError: an unknown generation, or a size out of range.
    #[staticmethod]
    #[pyo3(signature = (generation, *, num_heads, num_kv_heads = None, head_dim, causal = true))]
    fn analytic(
        generation: &str,
        num_heads: &Bound<'_, PyAny>,
        num_kv_heads: Option<&Bound<'_, PyAny>>,
        head_dim: &Bound<'_, PyAny>,
        causal: bool,
    ) -> PyResult<Self> {
        let generation: Generation = generation.parse().map_err(raise)?;
        let num_heads = integer("num_heads", num_heads)?;
        let num_kv_heads = num_kv_heads.map_or(Ok(num_heads), |heads| integer("num_kv_heads", heads))?;
        let head_dim = integer("head_dim", head_dim)?;
        Model::analytic(generation, num_heads, num_kv_heads, head_dim, mask(causal)).map(Self).map_err(raise)
    }

    /// Latency of segments, one by one, in a call that fills the GPU.
    ///
    /// Args:
    ///     query_lengths: int[n], tokens of each segment.
    ///     key_lengths: int[n], keys that its last token sees; no fewer.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Returns:
    ///     float64[n], seconds.
    ///
    /// Raises:
    ///     WlbError: a length out of range, or more queries than keys.
    #[pyo3(signature = (query_lengths, key_lengths, *, passes = "forward_backward"))]
    fn segment_seconds<'py>(
        &self,
        py: Python<'py>,
        query_lengths: &Bound<'py, PyAny>,
        key_lengths: &Bound<'py, PyAny>,
        passes: &str,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let passes = passes.parse::<Passes>().map_err(raise)?;
        let queries = read_lengths("query_lengths", query_lengths)?;
        let keys = read_lengths("key_lengths", key_lengths)?;
        Ok(array(py, self.0.segments_seconds(&queries, &keys, passes).map_err(raise)?))
    }

    /// Latency of each rank's attention call: the sum of its segments, and a constant for the launch.
    ///
    /// Args:
    ///     shard: of the same mask.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Returns:
    ///     float64[cp_size], seconds; 0 for a rank without tokens.
    ///
    /// Raises:
    ///     WlbError: a shard of another mask.
    #[pyo3(signature = (shard, *, passes = "forward_backward"))]
    fn rank_seconds<'py>(
        &self,
        py: Python<'py>,
        shard: &Bound<'py, Shard>,
        passes: &str,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let passes = passes.parse::<Passes>().map_err(raise)?;
        Ok(array(py, self.0.rank_seconds(&shard.get().plan, passes).map_err(raise)?))
    }

    /// Where the numbers come from: "measured: (GPU) (kernel)" or "analytic: (generation)".
    #[getter]
    fn source(&self) -> &str {
        &self.0.description().source
    }

    /// Whether queries attend only to keys before them.
    #[getter]
    fn causal(&self) -> bool {
        self.0.mask() == Mask::Causal
    }

    /// Query heads of one GPU.
    #[getter]
    fn num_heads(&self) -> i64 {
        self.0.description().num_heads
    }

    /// Key and value heads of one GPU, as measured.
    #[getter]
    fn num_kv_heads(&self) -> i64 {
        self.0.description().num_kv_heads
    }

    /// Width of a head.
    #[getter]
    fn head_dim(&self) -> i64 {
        self.0.description().head_dim
    }

    /// Queries that a thread block computes at a time; segments are padded to it.
    #[getter]
    fn tile(&self) -> i64 {
        self.0.description().tile
    }

    fn __repr__(&self) -> String {
        let (heads, head_dim) = (self.num_heads(), self.head_dim());
        format!(
            "KernelModel({:?}, num_heads={heads}, head_dim={head_dim}, causal={})",
            self.source(),
            self.0.description().causal
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Pickled<'py, (String,)>> {
        as_json(slf, slf.get().0.to_json())
    }

    #[staticmethod]
    fn _from_json(json: &str) -> PyResult<Self> {
        Model::from_json(json).map(Self).map_err(raise)
    }
}
