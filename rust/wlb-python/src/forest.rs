//! `wlb.PrefixForest`, which `wlb.pack` and `wlb.shard` take.

use std::sync::Arc;

use numpy::{PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use wlb_core::Lengths;
use wlb_core::forest as core;

use crate::arguments;
use crate::convert::{int64_array, integer, integers, is_plain};
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::plain::{Array, hashed_by, pickled_as_json};

/// Token ids of samples, which are only compared. They are read in place while the GIL is held: most of them are never
/// read, and a copy would take longer than all other work.
pub(crate) enum Tokens<'py> {
    Narrow(Bound<'py, PyArrayDyn<i32>>),
    Wide(Bound<'py, PyArrayDyn<i64>>),
}

fn tokens<'py>(object: &Bound<'py, PyAny>) -> PyResult<Tokens<'py>> {
    if let Ok(array) = object.cast_exact::<PyArrayDyn<i32>>()
        && array.ndim() == 1
        && is_plain(array)
    {
        return Ok(Tokens::Narrow(array.clone()));
    }
    int64_array("tokens", object).map(Tokens::Wide)
}

/// `with_tokens!(tokens, |slice| work)` runs `work` on tokens of either width. `work` must terminate and stay in bounds
/// even if another thread of numpy writes to the array meanwhile.
macro_rules! with_tokens {
    ($tokens:ident, |$slice:ident| $work:expr) => {
        // SAFETY: the GIL is held and no Python code runs meanwhile; `as_slice` checks that memory is aligned and
        // contiguous.
        match &$tokens {
            Tokens::Narrow(array) => {
                let $slice = unsafe { array.as_slice() }?;
                $work
            }
            Tokens::Wide(array) => {
                let $slice = unsafe { array.as_slice() }?;
                $work
            }
        }
    };
}

/// One number for all prompts, or one for each.
pub(crate) enum PerPrompt {
    All(i64),
    Each(Vec<i64>),
}

fn samples_per_prompt(object: &Bound<'_, PyAny>) -> PyResult<PerPrompt> {
    let argument = "samples_per_prompt";
    if object.is_instance_of::<PyInt>() {
        integer(argument, object).map(PerPrompt::All)
    } else {
        integers(argument, object).map(PerPrompt::Each)
    }
}

/// What is packed or sharded: documents, or the samples of a forest.
pub(crate) enum Batch {
    Documents(Lengths),
    Forest(Arc<core::PrefixForest>),
}

impl Batch {
    /// Reads lengths, or a forest.
    pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match object.cast::<PrefixForest>() {
            Ok(forest) => Ok(Self::Forest(forest.get().0.clone())),
            Err(_) => arguments::lengths(object).map(Self::Documents),
        }
    }
}

/// Refuses what has a meaning for documents alone: for each argument whether it was given, and the problem.
pub(crate) fn refuse_for_forests(arguments: &[(&str, bool, &str)]) -> PyResult<()> {
    match arguments.iter().find(|(_, given, _)| *given) {
        Some((argument, _, problem)) => Err(refuse(argument, None, None, problem)),
        None => Ok(()),
    }
}

/// The tokens that samples share: plain data that can be printed, compared, pickled and sent.
///
/// A node is a run of tokens. A sample is the path from a root to the end of its node; the node may have children.
/// Samples share tokens only from their beginning on, so a shared token has the same position and the same earlier
/// tokens in all of them. Every array is a fresh copy.
///
/// Examples:
///     >>> import wlb
///     >>> forest = wlb.PrefixForest.from_prompts([100], 3, [30, 20, 10])
///     >>> forest
///     PrefixForest(samples=3, nodes=4, unique_tokens=160, raw_tokens=360)
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(Clone, PartialEq)]
pub(crate) struct PrefixForest(pub(crate) Arc<core::PrefixForest>);

hashed_by!(PrefixForest: |forest| forest.0.digest());
pickled_as_json!(PrefixForest(core::PrefixForest));

#[pymethods]
impl PrefixForest {
    /// The forest of samples with these tokens.
    ///
    /// Args:
    ///     tokens: int[R], tokens of all samples, one sample after the other; int32 and int64 arrays are read in place.
    ///         For an Arrow list array: its ``values``.
    ///     offsets: int[n + 1], index of each sample's first token, and at the end ``R``. For an Arrow list array: its
    ///         ``offsets``.
    ///     groups: int[n]: only samples with the same number can share (the completions of one prompt).
    ///     key: int[n]: another number with the same effect, for other inputs of the model: an image's hash, an
    ///         adapter.
    ///
    /// Returns:
    ///     PrefixForest: nodes depth-first, siblings by their first sample.
    ///
    /// Raises:
    ///     WlbError: offsets that do not fit the tokens, a sample without tokens, ``groups`` or ``key`` of another
    ///         length.
    ///
    /// O(R + n log n) in the worst case: shared tokens are compared once or twice, and the rest of a sample is not
    /// read. No copy.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_tokens([7, 8, 1, 7, 8, 2, 2, 7, 8], [0, 3, 7, 9])
    ///     >>> forest.parents, forest.lengths, forest.ends
    ///     (array([-1,  0,  0], dtype=int32), array([2, 1, 2], dtype=int32), array([1, 2, 0], dtype=int32))
    #[staticmethod]
    #[pyo3(signature = (tokens, offsets, groups = None, key = None))]
    fn from_tokens(
        #[pyo3(from_py_with = tokens)] tokens: Tokens<'_>,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
        #[pyo3(from_py_with = arguments::optional::groups)] groups: Option<Vec<i64>>,
        #[pyo3(from_py_with = arguments::optional::key)] key: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        let (groups, key) = (groups.unwrap_or_default(), key.unwrap_or_default());
        let found = with_tokens!(tokens, |slice| core::PrefixForest::from_tokens(slice, &offsets, &groups, &key));
        found.map(Self::from).map_err(raise)
    }

    /// The forest of prompts and the completions that were sampled for each; tokens are not needed.
    ///
    /// Args:
    ///     prompt_lengths: int[p], tokens of each prompt.
    ///     samples_per_prompt: completions of each prompt, one number or int[p]; at least 1.
    ///     completion_lengths: int[n], tokens of each completion, those of the first prompt first. A completion may
    ///         have 0
    ///         tokens: the sample is then its prompt.
    ///
    /// Raises:
    ///     WlbError: a length out of range, or numbers that do not fit together.
    ///
    /// O(n log n).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([100, 50], [2, 1], [30, 20, 10])
    ///     >>> forest.parents, forest.lengths
    ///     (array([-1,  0,  0, -1], dtype=int32), array([100,  30,  20,  60], dtype=int32))
    #[staticmethod]
    #[pyo3(signature = (prompt_lengths, samples_per_prompt, completion_lengths))]
    fn from_prompts(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::prompt_lengths)] prompt_lengths: Lengths,
        #[pyo3(from_py_with = samples_per_prompt)] samples_per_prompt: PerPrompt,
        #[pyo3(from_py_with = arguments::completion_lengths)] completion_lengths: Vec<i64>,
    ) -> PyResult<Self> {
        let each = match samples_per_prompt {
            PerPrompt::All(samples) => vec![samples; prompt_lengths.len()],
            PerPrompt::Each(each) => each,
        };
        let make = || core::PrefixForest::from_prompts(&prompt_lengths, &each, &completion_lengths);
        run(py, completion_lengths.len(), make).map(Self::from).map_err(raise)
    }

    /// A forest from its nodes.
    ///
    /// Args:
    ///     parents: int[m], the node that each node continues, in any order; -1 for a root.
    ///     lengths: int[m], tokens of each node.
    ///     ends: int[n], for each sample the node of its last token.
    ///
    /// Raises:
    ///     WlbError: a parent or end that is no node, parents in a circle, or a node under which no sample ends.
    ///
    /// O(m log m).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.PrefixForest.from_parents([-1, 0, 0], [100, 30, 20], [1, 2]).sample_lengths
    ///     array([130, 120], dtype=int32)
    #[staticmethod]
    #[pyo3(signature = (parents, lengths, ends))]
    fn from_parents(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::parents)] parents: Vec<i64>,
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::ends)] ends: Vec<i64>,
    ) -> PyResult<Self> {
        let make = || core::PrefixForest::from_parents(&parents, &lengths, &ends);
        run(py, parents.len(), make).map(Self::from).map_err(raise)
    }

    /// Checks that tokens fit the forest: samples have its lengths, and agree where they share a node.
    ///
    /// Args:
    ///     tokens, offsets: as for ``from_tokens``.
    ///
    /// Raises:
    ///     WlbError: another number of samples, a sample of another length, or the first token in which two samples
    ///         differ that should share it; the message names both samples and the token.
    ///
    /// O(R).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([2], 2, [1, 1])
    ///     >>> forest.check_tokens([7, 8, 1, 7, 8, 2], [0, 3, 6])  # or an error that names the token
    #[pyo3(signature = (tokens, offsets))]
    fn check_tokens(
        &self,
        #[pyo3(from_py_with = tokens)] tokens: Tokens<'_>,
        #[pyo3(from_py_with = arguments::offsets)] offsets: Vec<i64>,
    ) -> PyResult<()> {
        with_tokens!(tokens, |slice| self.0.check_tokens(slice, &offsets)).map_err(raise)
    }

    /// Number of samples, ``n``.
    #[getter]
    fn num_samples(&self) -> usize {
        self.0.num_samples()
    }

    /// Number of nodes, ``m``.
    #[getter]
    fn num_nodes(&self) -> usize {
        self.0.num_nodes()
    }

    /// Tokens of all nodes: what is computed if one micro-batch holds all samples.
    #[getter]
    fn unique_tokens(&self) -> i64 {
        self.0.unique_tokens()
    }

    /// Tokens of all samples: what is computed without sharing.
    #[getter]
    fn raw_tokens(&self) -> i64 {
        self.0.raw_tokens()
    }

    /// int32[m]: the node that each node continues; -1 for a root.
    #[getter]
    fn parents(&self) -> Array<&[i32]> {
        Array(self.0.parents())
    }

    /// int32[m]: tokens of each node.
    #[getter]
    fn lengths(&self) -> Array<&[i32]> {
        Array(self.0.lengths())
    }

    /// int32[m]: tokens before each node on its path, which is the position of its first token.
    #[getter]
    fn starts(&self) -> Array<&[i32]> {
        Array(self.0.starts())
    }

    /// int32[n]: for each sample the node of its last token.
    #[getter]
    fn ends(&self) -> Array<&[i32]> {
        Array(self.0.ends())
    }

    /// int32[n]: tokens of each sample.
    #[getter]
    fn sample_lengths(&self) -> Array<Vec<i32>> {
        Array(self.0.sample_lengths())
    }

    /// int64[raw_tokens]: place of each sample's tokens, sample by sample, in the sequence in which ``shard`` packs the
    /// nodes: depth-first, the longest of siblings first. O(raw_tokens).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> forest = wlb.PrefixForest.from_prompts([2], 2, [1, 2])
    ///     >>> forest.token_indices
    ///     array([0, 1, 4, 0, 1, 2, 3])
    #[getter]
    fn token_indices(&self, py: Python<'_>) -> Array<Vec<i64>> {
        Array(run(py, self.0.num_samples(), || self.0.token_indices()))
    }

    /// Hex hash of the forest: equal on two ranks if and only if their forests are. O(m + n).
    fn digest(&self, py: Python<'_>) -> String {
        run(py, self.0.num_nodes(), || self.0.digest())
    }

    fn __repr__(&self) -> String {
        format!(
            "PrefixForest(samples={}, nodes={}, unique_tokens={}, raw_tokens={})",
            self.0.num_samples(),
            self.0.num_nodes(),
            self.0.unique_tokens(),
            self.0.raw_tokens(),
        )
    }
}

impl From<core::PrefixForest> for PrefixForest {
    fn from(forest: core::PrefixForest) -> Self {
        Self(Arc::new(forest))
    }
}
