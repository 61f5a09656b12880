//! Every argument that is a number or an array: its name, its type, and how it is read. A name means the same in all
//! functions.
//!
//! Ranges that are listed here are checked here; all other ranges are checked by the core.

use pyo3::PyTypeInfo;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wlb_core::Lengths;
use wlb_core::limits::{
    MAX_COLUMNS, MAX_CP_SIZE, MAX_MICRO_BATCHES, MAX_QUEUES, MAX_STAGES, MAX_TOKENS, MAX_WORLD_SIZE,
};

use crate::convert::{
    count, flag, floats, floats_by_row, integer, integers, iterations, narrow, positive, rates_by_size, read_lengths,
    real, size,
};
use crate::error::raise;
use crate::results::declaration;

/// Numbers row by row, and the numbers of rows and columns.
pub(crate) type Table = (Vec<f64>, usize, usize);

/// `name: Type = reader(limits)` makes a function `name` for `from_py_with`, whose errors name the argument, and one of
/// the same name in [`optional`] for an argument that may be None.
macro_rules! arguments {
    ($($name:ident: $type:ty = $reader:ident($($limit:expr),*);)+) => {
        $(
            pub(crate) fn $name(object: &Bound<'_, PyAny>) -> PyResult<$type> {
                $reader(stringify!($name), object $(, $limit)*)
            }
        )+

        #[allow(dead_code, reason = "some are never None")]
        pub(crate) mod optional {
            use pyo3::prelude::*;

            use crate::arguments::{Lengths, Table};

            $(
                pub(crate) fn $name(object: &Bound<'_, PyAny>) -> PyResult<Option<$type>> {
                    if object.is_none() { Ok(None) } else { crate::arguments::$name(object).map(Some) }
                }
            )+
        }
    };
}

arguments! {
    allow_config_change: bool = flag();
    assignment: Vec<i64> = integers();
    attention: f64 = real();
    attention_costs: Vec<f64> = floats();
    attention_efficiency: f64 = real();
    attention_seconds: Vec<f64> = floats();
    causal: bool = flag();
    chunks: Vec<(i32, f64)> = rates_by_size();
    class_rounds: bool = flag();
    classes: Vec<i64> = integers();
    completion_lengths: Vec<i64> = integers();
    cost_columns: usize = size(1, MAX_COLUMNS as i64);
    costs: Table = floats_by_row();
    cp_seconds_per_key: f64 = real();
    cp_size: usize = count(MAX_CP_SIZE);
    delay_price: f64 = real();
    document: f64 = real();
    dp_size: i64 = integer();
    early: Vec<i64> = integers();
    ends: Vec<i64> = integers();
    equal_documents: bool = flag();
    equal_samples: bool = flag();
    experts_per_token: i64 = integer();
    ffn_hidden_size: i64 = integer();
    flops_per_second: f64 = real();
    gated_ffn: bool = flag();
    head_dim: i64 = integer();
    hidden_size: i32 = positive();
    hybrid_threshold: i64 = integer();
    global_batches: usize = count(MAX_MICRO_BATCHES);
    group_seconds: Vec<f64> = floats();
    group_sizes: Vec<i64> = integers();
    groups: Vec<i64> = integers();
    ids: Vec<i64> = integers();
    key: Vec<i64> = integers();
    key_lengths: Lengths = read_lengths();
    lengths: Lengths = read_lengths();
    limits: Vec<f64> = floats();
    linear: f64 = real();
    linear_seconds: Vec<f64> = floats();
    max_cp_size: usize = count(MAX_WORLD_SIZE);
    max_delay: u64 = iterations();
    max_document_tokens: i32 = positive();
    max_documents: usize = count(MAX_TOKENS as usize);
    max_early: i64 = integer();
    max_mean_delay: f64 = real();
    max_imbalance: f64 = real();
    max_micro_batches: usize = count(MAX_MICRO_BATCHES);
    max_samples: usize = count(MAX_TOKENS as usize);
    max_step_cost: f64 = real();
    max_tokens: i32 = positive();
    max_tokens_per_rank: i32 = positive();
    micro_batch: f64 = real();
    micro_batch_seconds: f64 = real();
    min_micro_batches: usize = count(MAX_MICRO_BATCHES);
    min_step_tokens: i64 = integer();
    more: bool = flag();
    most: i64 = integer();
    most_early: Vec<i64> = integers();
    multiple_of: usize = count(MAX_MICRO_BATCHES);
    multiple_of_tokens: i32 = positive();
    num_heads: i64 = integer();
    num_kv_heads: i64 = integer();
    num_layers: i64 = integer();
    num_micro_batches: usize = count(MAX_MICRO_BATCHES);
    num_queues: usize = size(0, MAX_QUEUES as i64);
    num_stages: usize = count(MAX_STAGES);
    num_steps: usize = count(MAX_MICRO_BATCHES);
    num_virtual_stages: usize = count(MAX_STAGES);
    offsets: Vec<i64> = integers();
    outlier_thresholds: Vec<i32> = narrow("thresholds are int32");
    overlap: f64 = real();
    p2p_seconds: f64 = real();
    parents: Vec<i64> = integers();
    prompt_lengths: Lengths = read_lengths();
    prompts_per_step: usize = count(MAX_TOKENS as usize);
    query_lengths: Lengths = read_lengths();
    rest_waits: bool = flag();
    ranks_per_node: usize = count(MAX_WORLD_SIZE);
    recompute: bool = flag();
    sample_tokens: Vec<i64> = integers();
    samples_per_step: usize = count(MAX_TOKENS as usize);
    seconds: Vec<f64> = floats();
    seconds_per_exchange: f64 = real();
    seconds_per_exchange_in_node: f64 = real();
    seconds_per_token: f64 = real();
    seconds_per_token_in_node: f64 = real();
    steps: Vec<i64> = integers();
    starts: Vec<i32> = narrow("a document has at most 2147483647 tokens");
    token_buckets: Vec<i32> = narrow("sizes are int32");
    to_the_end: bool = flag();
    tokens: i64 = integer();
    tokens_per_batch: i64 = integer();
    vocab_size: i64 = integer();
    wanted: i64 = integer();
    windows: Vec<(i32, f64)> = rates_by_size();
    world_size: usize = count(MAX_WORLD_SIZE);
}

/// Refuses options that the constructor of this class does not have: a TypeError that names the nearest one.
pub(crate) fn refuse_unknown<T: PyTypeInfo>(unknown: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let Some(unknown) = unknown.filter(|unknown| !unknown.is_empty()) else { return Ok(()) };
    let class = T::type_object(unknown.py());
    declaration(unknown.py(), "wlb._named.refuse_unknown")?.call1((class, unknown)).map(|_| ())
}

/// `num_micro_batches`: a number, or none; and whether it is "fewest".
pub(crate) fn number_or_fewest(object: &Bound<'_, PyAny>) -> PyResult<(Option<usize>, bool)> {
    let Ok(value) = object.extract::<String>() else {
        return optional::num_micro_batches(object).map(|number| (number, false));
    };
    if value == "fewest" {
        return Ok((None, true));
    }
    let (argument, choices) = ("num_micro_batches", "a number, \"fewest\", None".to_owned());
    Err(raise(wlb_core::Error::Choice { argument, value, choices }))
}
