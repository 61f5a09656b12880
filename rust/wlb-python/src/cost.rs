//! `wlb.CostModel` and `wlb.pairs`.

use numpy::PyArray1;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use wlb_core::Lengths;
use wlb_core::cost::fit::{FitOptions, FittedTerm};
use wlb_core::cost::{CostModel as Model, DocumentCosts, FlopsOptions, Mask, Passes, Rates, Unit};
use wlb_core::packing::Pricing;

use crate::arguments::{self, Table};
use crate::convert::{choice, integer, integers, profile, read_lengths, sizes};
use crate::error::{raise, refuse};
use crate::gil::run;
use crate::plain::{Array, Tuple, hashed_by, pickled_as_json};
use crate::results::answer;

/// Reads costs of documents if they are given; there must be `documents` of them.
pub(crate) fn document_costs(
    costs: Option<Table>,
    limits: Option<&[f64]>,
    documents: usize,
) -> PyResult<Option<DocumentCosts>> {
    let Some((values, found, columns)) = costs else { return Ok(None) };
    if found != documents {
        let (argument, other) = ("costs", "lengths");
        return Err(raise(wlb_core::Error::Mismatch { argument, found, other, expected: documents }));
    }
    if limits.is_some_and(<[f64]>::is_empty) {
        let (argument, other) = ("limits", "the columns of costs");
        return Err(raise(wlb_core::Error::Mismatch { argument, found: 0, other, expected: columns }));
    }
    DocumentCosts::new(values, documents, columns, limits.unwrap_or_default()).map(Some).map_err(raise)
}

/// Costs of documents from a model or as given; exactly one of the two must be there.
pub(crate) fn pricing<'a>(
    cost_model: Option<&'a Model>,
    given: Option<&'a DocumentCosts>,
    limits: Option<&[f64]>,
) -> PyResult<Pricing<'a>> {
    let wrong = |argument, problem: &str| Err(refuse(argument, None, None, problem));
    match (cost_model, given) {
        (Some(_), None) if limits.is_some() => wrong("limits", "limit columns of costs: pass costs"),
        (Some(model), None) => Ok(Pricing::Model(model)),
        (None, Some(given)) => Ok(Pricing::Given(given)),
        (Some(_), Some(_)) => wrong("costs", "take the place of cost_model: pass one of the two"),
        (None, None) => wrong("cost_model", "is missing: pass it, or costs of the documents"),
    }
}

pub(crate) fn mask(causal: bool) -> Mask {
    if causal { Mask::Causal } else { Mask::Full }
}

/// Cost of documents: ``cost(d) = attention * pairs(d) + linear * d`` and a few further terms, all in one unit.
///
/// Attention is quadratic in a document's length, everything else (GEMMs, collectives, element-wise work) is linear.
/// Layers of windowed or chunked attention have pairs of their own, which are exact functions of the length. Take the
/// cost from your model and GPU: a wrong cost model can lose a hundred times more balance than greedy packing does.
/// Make one from rates, ``from_flops``, ``from_tables``, ``from_profile`` or ``fit``. Immutable and picklable; equal
/// models compare equal.
///
/// Args:
///     attention: cost of one (query, key) pair; 0 or above.
///     linear: cost of one token; 0 or above, and not 0 together with ``attention``.
///     causal: True: a document has ``d(d+1)/2`` pairs. False, for bidirectional masks: ``d*d``.
///     windows: ``{w: rate}``, cost of a pair under a sliding window of ``w`` keys: a query sees itself and the ``w -
///         1`` tokens before it. Causal only. A window of at least 2^31 - 1 is no window: its rate is added to
///         ``attention``.
///     chunks: ``{c: rate}``, cost of a pair in chunks of ``c`` tokens: a query sees itself and all tokens before it in
///         its chunk. Causal only.
///     document: cost of every document besides the cost of its length.
///     micro_batch: cost of every micro-batch besides its documents; an empty micro-batch is run and costs this, too.
///     unit: unit of the costs, "seconds" or "flops"; None if unknown. Functions that add seconds to costs
///         (``plan_dynamic_cp``) refuse "flops".
///
/// Raises:
///     WlbError: a rate is negative or not finite; documents cost nothing; a window or chunk is below 1, or used
///         without a causal mask.
///
/// Examples:
///     >>> import wlb
///     >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
///     >>> cost.cost([10, 20])
///     array([10055., 20210.])
#[pyclass(frozen, eq, hash, module = "wlb")]
#[derive(PartialEq)]
pub(crate) struct CostModel(pub(crate) Model);

/// Reads the argument `cost_model`.
pub(crate) fn read_costs(cost_model: &Bound<'_, PyAny>) -> PyResult<Model> {
    if let Ok(model) = cost_model.cast::<CostModel>() {
        return Ok(model.get().0.clone());
    }
    let kind = cost_model.get_type().qualname().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let remedy = match kind.as_str() {
        "ModelConfig" => ": take its .cost_model()",
        "str" => ": wlb.ModelConfig.preset(name).cost_model() and wlb.CostModel.from_profile(name) make one",
        _ => "",
    };
    Err(PyTypeError::new_err(format!("cost_model: '{kind}' object is no CostModel{remedy}")))
}

/// Reads the argument `cost_model` where `costs` may replace it.
pub(crate) fn read_costs_if_any(cost_model: &Bound<'_, PyAny>) -> PyResult<Option<Model>> {
    if cost_model.is_none() { Ok(None) } else { read_costs(cost_model).map(Some) }
}

hashed_by!(CostModel: |cost| cost.0.to_json());
pickled_as_json!(CostModel(Model));

#[pymethods]
impl CostModel {
    /// Unit of the costs, "seconds" or "flops"; None if it was not given. Measured tables are in seconds.
    #[getter]
    fn unit(&self) -> Option<&'static str> {
        self.0.unit().map(Unit::as_str)
    }

    /// Whether pairs are counted under a causal mask.
    #[getter]
    fn causal(&self) -> bool {
        self.0.mask() == Mask::Causal
    }
}

#[pymethods]
impl CostModel {
    /// Rates that are not 0, by term, in this order: "pairs", "window_pairs[w]" and "chunk_pairs[c]" by ascending size,
    /// "tokens", "documents", "micro_batches".
    ///
    /// Raises:
    ///     WlbError: the model was made from measured tables, whose rates change with the length.
    #[getter]
    fn terms<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Some(terms) = self.0.terms() else {
            let problem = "was made from measured tables, whose rates change with the length, so it has no terms";
            return Err(refuse("cost_model", None, None, problem));
        };
        terms.into_py_dict(py)
    }

    /// The model as JSON text. ``from_json`` reads it, and so does the option ``--cost-model`` of the ``wlb`` command.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.CostModel(attention=1.0, linear=2.0).to_json()
    ///     '{"attention":{"rate":1.0},"linear":{"rate":2.0},"mask":"causal"}'
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// The model that ``to_json`` wrote.
    ///
    /// Raises:
    ///     WlbError: the text is not such a model; the message says where.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        Self::_from_json(text)
    }

    fn __repr__(&self) -> String {
        format!("CostModel({})", self.0.to_json())
    }
}

#[pymethods]
impl CostModel {
    #[new]
    #[pyo3(text_signature = "(*, attention, linear, causal=True, windows=None, chunks=None, document=0.0, \
                          micro_batch=0.0, unit=None)")]
    #[pyo3(signature = (
    *, attention, linear, causal = true, windows = None, chunks = None, document = 0.0, micro_batch = 0.0,
    unit = None, **unknown
))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        #[pyo3(from_py_with = arguments::attention)] attention: f64,
        #[pyo3(from_py_with = arguments::linear)] linear: f64,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
        #[pyo3(from_py_with = arguments::optional::windows)] windows: Option<Vec<(i32, f64)>>,
        #[pyo3(from_py_with = arguments::optional::chunks)] chunks: Option<Vec<(i32, f64)>>,
        #[pyo3(from_py_with = arguments::document)] document: f64,
        #[pyo3(from_py_with = arguments::micro_batch)] micro_batch: f64,
        unit: Option<&str>,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        arguments::refuse_unknown::<Self>(unknown)?;
        let (windows, chunks) = (windows.unwrap_or_default(), chunks.unwrap_or_default());
        let unit = unit.map(choice).transpose()?;
        let rates = Rates { attention, linear, mask: mask(causal), windows, chunks, document, micro_batch, unit };
        Model::from_rates(&rates).map(Self).map_err(raise)
    }

    /// Cost from the FLOPs of a decoder-only transformer.
    ///
    /// Forward: ``4 * num_heads * head_dim`` FLOPs per (query, key) pair and layer, and 2 per parameter and token.
    /// Backward: 2.5 times as many per pair (flash attention recomputes the scores), and 2 times as many per token.
    ///
    /// Args:
    ///     hidden_size, ffn_hidden_size, num_layers, num_heads, vocab_size: as in the model's configuration.
    ///     num_kv_heads: key/value heads, for GQA and MQA; default ``num_heads``.
    ///     head_dim: default ``hidden_size / num_heads``.
    ///     gated_ffn: three feed-forward matrices (SwiGLU) instead of two.
    ///     experts_per_token: experts that one token visits; 1 for a dense model.
    ///     attention_efficiency: FLOP rate of attention relative to the GEMMs' rate, for example 0.55.
    ///     flops_per_second: FLOP rate of the GEMMs, for costs in seconds; by default the unit is one GEMM FLOP.
    ///     passes: "forward", "backward" or "forward_backward".
    ///     recompute: whether activations are recomputed: the backward pass then runs the forward pass once more.
    ///     causal: whether queries see only keys before them.
    ///
    /// Raises:
    ///     WlbError: a size below 1, a rate that is not positive, a hidden size that the heads do not divide.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> cost = wlb.CostModel.from_flops(hidden_size=4096, ffn_hidden_size=11008, num_layers=32, num_heads=32,
    ///     ...                                 vocab_size=32000, attention_efficiency=0.55)
    ///     >>> cost.cost([131072]) / cost.cost([1024]) > 128 * 6
    ///     array([ True])
    #[staticmethod]
    #[pyo3(signature = (
    *, hidden_size, ffn_hidden_size, num_layers, num_heads, num_kv_heads = None, vocab_size, head_dim = None,
    gated_ffn = true, experts_per_token = 1, attention_efficiency = 1.0, flops_per_second = 1.0,
    passes = "forward_backward", recompute = false, causal = true
))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn from_flops(
        #[pyo3(from_py_with = arguments::hidden_size)] hidden_size: i32,
        #[pyo3(from_py_with = arguments::ffn_hidden_size)] ffn_hidden_size: i64,
        #[pyo3(from_py_with = arguments::num_layers)] num_layers: i64,
        #[pyo3(from_py_with = arguments::num_heads)] num_heads: i64,
        #[pyo3(from_py_with = arguments::optional::num_kv_heads)] num_kv_heads: Option<i64>,
        #[pyo3(from_py_with = arguments::vocab_size)] vocab_size: i64,
        #[pyo3(from_py_with = arguments::optional::head_dim)] head_dim: Option<i64>,
        #[pyo3(from_py_with = arguments::gated_ffn)] gated_ffn: bool,
        #[pyo3(from_py_with = arguments::experts_per_token)] experts_per_token: i64,
        #[pyo3(from_py_with = arguments::attention_efficiency)] attention_efficiency: f64,
        #[pyo3(from_py_with = arguments::flops_per_second)] flops_per_second: f64,
        passes: &str,
        #[pyo3(from_py_with = arguments::recompute)] recompute: bool,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
    ) -> PyResult<Self> {
        let hidden_size = i64::from(hidden_size);
        let head_dim = match head_dim {
            Some(head_dim) => head_dim,
            // The core refuses fewer than one head and names the argument.
            None if num_heads < 1 || hidden_size % num_heads == 0 => hidden_size / num_heads.max(1),
            None => {
                let (argument, requirement) = ("head_dim", "num_heads does not divide hidden_size: pass head_dim");
                return Err(raise(wlb_core::Error::Combination { argument, requirement }));
            }
        };
        Model::from_flops(&FlopsOptions {
            hidden_size,
            ffn_hidden_size,
            num_layers,
            num_heads,
            num_kv_heads: num_kv_heads.unwrap_or(num_heads),
            head_dim,
            vocab_size,
            gated_ffn,
            experts_per_token,
            attention_efficiency,
            flops_per_second,
            passes: choice(passes)?,
            recompute,
            mask: mask(causal),
        })
        .map(Self)
        .map_err(raise)
    }

    /// Cost from times measured at some document lengths.
    ///
    /// Between two of the lengths, attention is linear in the pairs, so it is exact wherever it is quadratic in the
    /// length; the rest is linear in the tokens. Both are 0 at length 0, and proportional to pairs (tokens) beyond the
    /// last length.
    ///
    /// Args:
    ///     lengths: int[k], tokens, strictly ascending.
    ///     attention_seconds, linear_seconds: float[k], cost of one document of each length; above 0, never decreasing.
    ///     causal: mask under which they were measured.
    ///
    /// Raises:
    ///     WlbError: naming the entry that does not fit.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> attention, linear = [1e-3, 15e-3], [2e-3, 8e-3]
    ///     >>> cost = wlb.CostModel.from_tables([1024, 4096], attention_seconds=attention, linear_seconds=linear)
    ///     >>> cost.cost([1024, 4096])
    ///     array([0.003, 0.023])
    #[staticmethod]
    #[pyo3(signature = (lengths, *, attention_seconds, linear_seconds, causal = true))]
    fn from_tables(
        #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths,
        #[pyo3(from_py_with = arguments::attention_seconds)] attention_seconds: Vec<f64>,
        #[pyo3(from_py_with = arguments::linear_seconds)] linear_seconds: Vec<f64>,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
    ) -> PyResult<Self> {
        Model::from_tables(&lengths, &attention_seconds, &linear_seconds, mask(causal)).map(Self).map_err(raise)
    }

    /// Cost from a measured profile: a JSON file, or the name of a profile that comes with wlb.
    ///
    /// Args:
    ///     path_or_name: path of a ``.json`` file, or a name in ``wlb.profiles.names()``.
    ///     passes: "forward", "backward" or "forward_backward" (their sum).
    ///
    /// Raises:
    ///     WlbError: no such profile, or a malformed one; the message says where in the file.
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> name = "nvidia-h200-varlenkernel-torch-2-11-0-h32-kv8-d128"
    ///     >>> wlb.CostModel.from_profile(name).unit
    ///     'seconds'
    #[staticmethod]
    #[pyo3(signature = (path_or_name, *, passes = "forward_backward"))]
    fn from_profile(path_or_name: &Bound<'_, PyAny>, passes: &str) -> PyResult<Self> {
        let passes = choice(passes)?;
        Model::from_profile(&profile(path_or_name)?, passes).map(Self).map_err(raise)
    }

    /// Cost of each document.
    ///
    /// Args:
    ///     lengths: int[n], tokens.
    ///
    /// Returns:
    ///     float64[n].
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> wlb.CostModel(attention=1.0, linear=1000.0).cost([10, 20])
    ///     array([10055., 20210.])
    #[pyo3(signature = (lengths))]
    fn cost(&self, #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths) -> PyResult<Array<Vec<f64>>> {
        self.0.check_finite(&lengths).map_err(raise)?;
        Ok(Array(self.0.costs(&lengths)))
    }

    /// The part of ``cost`` that depends on pairs of all kinds; float64[n].
    #[pyo3(signature = (lengths))]
    fn attention_cost(&self, #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths) -> PyResult<Array<Vec<f64>>> {
        self.0.check_finite(&lengths).map_err(raise)?;
        Ok(Array(lengths.iter().map(|&length| self.0.attention_cost(length)).collect()))
    }

    /// The part of ``cost`` that depends on tokens; float64[n].
    #[pyo3(signature = (lengths))]
    fn linear_cost(&self, #[pyo3(from_py_with = arguments::lengths)] lengths: Lengths) -> PyResult<Array<Vec<f64>>> {
        self.0.check_finite(&lengths).map_err(raise)?;
        Ok(Array(lengths.iter().map(|&length| self.0.linear_cost(length)).collect()))
    }

    /// The cost model, in seconds, that explains measured times of micro-batches.
    ///
    /// The fit minimises the sum of ``rho((seconds - predicted) / predicted)`` over rates that are never negative.
    /// Errors are relative, and ``rho`` (Huber's, then Tukey's bisquare) ignores rows that the other rows contradict. A
    /// term that the times do not need gets no rate. Of terms that the times cannot tell apart, the last in this order
    /// gets no rate: tokens, pairs, windows, chunks, documents, micro-batches. The result names such terms; time is
    /// never split between them. Deterministic.
    ///
    /// Args:
    ///     micro_batches: list of int[documents], tokens of the documents in each; at least eight, and two for each
    ///         term.
    ///     seconds: float[micro-batches], time of each, forward and backward.
    ///     windows: sizes of the sliding windows of the model's layers.
    ///     chunks: sizes of the chunks of the model's layers.
    ///     terms: which of "pairs", "tokens", "documents", "micro_batches" to try, besides windows and chunks; default
    ///         all.
    ///     causal: whether queries see only keys before them.
    ///     ranks: int[micro-batches], number of context-parallel ranks that shared each micro-batch, if it differs
    ///         (Dynamic-CP). Pairs and tokens are divided by it, as in ``plan_dynamic_cp``. Default 1: the rates are
    ///         then those of a whole group of ranks.
    ///
    /// Returns:
    ///     CostFit
    ///
    /// Raises:
    ///     WlbError: a time that is not above 0; too few micro-batches; documents of a single length; times that do not
    ///         grow with the documents; numbers of micro-batches and times that differ. The message names the entry.
    ///
    /// O(n k^2) for n micro-batches and k terms, some hundred times. Lawson and Hanson, Solving Least Squares Problems
    /// (1974); Holland and Welsch, Robust regression using iteratively reweighted least-squares (1977).
    ///
    /// Examples:
    ///     >>> import wlb
    ///     >>> true = wlb.CostModel(attention=1e-9, linear=1e-6)
    ///     >>> micro_batches = [[100 * i, 50 * i * i] for i in range(1, 13)]
    ///     >>> fit = wlb.CostModel.fit(micro_batches, [true.cost(lengths).sum() for lengths in micro_batches])
    ///     >>> round(fit.rates["pairs"] * 1e9, 3), round(fit.rates["tokens"] * 1e6, 3)
    ///     (1.0, 1.0)
    #[staticmethod]
    #[pyo3(text_signature = "(micro_batches, seconds, *, windows=(), chunks=(), terms=None, causal=True, ranks=None)")]
    #[pyo3(signature = (
    micro_batches, seconds, *, windows = None, chunks = None, terms = None, causal = true, ranks = None
))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn fit<'py>(
        py: Python<'py>,
        micro_batches: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = arguments::seconds)] seconds: Vec<f64>,
        windows: Option<&Bound<'py, PyAny>>,
        chunks: Option<&Bound<'py, PyAny>>,
        terms: Option<Vec<String>>,
        #[pyo3(from_py_with = arguments::causal)] causal: bool,
        ranks: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Ok(listed) = micro_batches.try_iter() else {
            return Err(refuse("micro_batches", None, Some(micro_batches), "must be a list of arrays of lengths"));
        };
        let rows = listed.enumerate().map(|(index, row)| {
            let row = row?;
            read_lengths("micro_batches", &row).map_err(|cause| {
                let problem = format!("holds no lengths of documents ({})", cause.value(py));
                refuse("micro_batches", Some(index), Some(&row), &problem)
            })
        });
        let rows = rows.collect::<PyResult<Vec<_>>>()?;
        let listed = |argument, object: Option<&Bound<'py, PyAny>>| {
            object.map_or(Ok(Vec::new()), |object| sizes(argument, object))
        };
        let (windows, chunks) = (listed("windows", windows)?, listed("chunks", chunks)?);
        let ranks = ranks.map(|object| integers("ranks", object)).transpose()?;
        let options = FitOptions { mask: mask(causal), windows, chunks, terms, ranks };
        let documents = rows.iter().map(|row| row.len()).sum::<usize>();
        let count = rows.len();
        let fitted = run(py, documents.saturating_add(64 * count), move || {
            let rows: Vec<&[i32]> = rows.iter().map(|row| &row[..]).collect();
            Model::fit(&rows, &seconds, &options)
        });
        let (model, fit) = fitted.map_err(raise)?;
        let by_name = |value: fn(&FittedTerm) -> f64| -> Vec<(String, f64)> {
            fit.terms.iter().map(|term| (term.name.clone(), value(term))).collect()
        };
        answer!(py, "CostFit", fit {
            residual, held_out_error, held_out;
            cost_model: Self(model),
            rates: by_name(|term| term.rate).into_py_dict(py)?,
            shares: by_name(|term| term.share).into_py_dict(py)?,
            share_errors: by_name(|term| term.share_error).into_py_dict(py)?,
            merged: Tuple(fit.merged.into_iter().map(Tuple).collect()),
            outliers: Array(fit.outliers.iter().map(|&row| row as i64).collect::<Vec<_>>()),
            rows: count,
        })
    }
}

/// FLOPs of a training step as multiples of the forward FLOPs: for a pair of attention, and for a token in matrix
/// products.
///
/// Args:
///     passes: "forward", "backward" or "forward_backward".
///     recompute: whether the backward pass runs the forward pass once more.
///
/// Raises:
///     WlbError: an unknown ``passes``.
#[pyfunction]
#[pyo3(signature = (passes, *, recompute = false))]
pub(crate) fn pass_weights(passes: &str, recompute: bool) -> PyResult<(f64, f64)> {
    choice::<Passes>(passes).map(|passes| passes.weights(recompute))
}

/// Exact (query, key) pairs of documents: ``d(d+1)/2`` under a causal mask, ``d*d`` under a full one.
///
/// Args:
///     lengths: int, or int[n]; tokens.
///     causal: whether queries see only keys before them.
///
/// Returns:
///     int, or int64[n].
///
/// Raises:
///     WlbError: a length below 1 or above 2**31 - 1.
///
/// Examples:
///     >>> import wlb
///     >>> wlb.pairs([3, 1, 2])
///     array([6, 1, 3])
#[pyfunction]
#[pyo3(signature = (lengths, *, causal = true))]
pub(crate) fn pairs<'py>(
    py: Python<'py>,
    lengths: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = arguments::causal)] causal: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let mask = mask(causal);
    if lengths.hasattr("__index__")? && !lengths.hasattr("__len__")? {
        let length = integer("lengths", lengths)?;
        let one = Lengths::new("lengths", &[length]).map_err(raise)?;
        return Ok(mask.pairs(one[0]).into_pyobject(py)?.into_any());
    }
    // At most 2^62.
    let pairs = arguments::lengths(lengths)?.iter().map(|&length| mask.pairs(length) as i64).collect();
    Ok(PyArray1::from_vec(py, pairs).into_any())
}
