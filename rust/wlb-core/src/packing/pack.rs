//! Packs one global batch, or several together, with the method that the options name.
//!
//! Methods leave over the documents that do not fit. This file decides whether that is an error, and what the error
//! advises. In fine-tuning and reinforcement learning a batch is trained whole in one step: there [`pack_whole`] finds
//! the number of micro-batches, from what memory holds and what data-parallel ranks need.

use crate::balance::fewest;
use crate::cost::DocumentCosts;
use crate::error::{Error, Result, check_range, saturating_i64};
use crate::lengths::Lengths;
use crate::limits::{MAX_MICRO_BATCHES, MAX_TOKENS};

use super::methods::columns::Priced;
use super::methods::{fixed_length, original, refined, var_length};
use super::options::{Leftover, Method, PackOptions, check_micro_batches};
use super::piece::Piece;
use super::plan::Packing;
use super::pricing::Pricing;

/// Packs one global batch.
///
/// # Arguments
/// * `lengths` - documents in arrival order; their ids are their indices. With `g` `global_batches` they are the
///   documents of `g` global batches, and step `i` trains micro-batches `i * num_micro_batches ..`.
/// * `costs` - costs of the documents: a [`CostModel`](crate::CostModel), or one row for each document in
///   [`DocumentCosts`](crate::cost::DocumentCosts).
///
/// # Returns
/// The micro-batches of all steps; under [`Leftover::Return`] also the documents that are left over.
///
/// # Errors
/// [`Error::OutOfRange`] for sizes, [`Error::TooLong`] for a document over `max_tokens` (methods that keep
/// documents whole), [`Error::Combination`] for several global batches where the method takes one,
/// [`Error::InfiniteCost`]; [`Error::LeftOver`] if not everything fits, under [`Leftover::Error`].
///
/// # Complexity
/// For `n` documents and `N` micro-batches: O(n) for the sort and, on average, a few steps for each document; O(n N) in
/// the worst case, and always for [`Method::FixedLength`].
///
/// # Example
/// ```
/// use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions, pack};
///
/// let lengths = Lengths::new("lengths", &[900, 100, 500, 400, 100])?;
/// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
/// let (method, leftover) = (Method::VarLength, Leftover::Error);
/// let options = PackOptions { num_micro_batches: 2, max_tokens: 1500, method, global_batches: 1, leftover };
/// let packing = pack(&lengths, &options, &cost)?;
/// // The longest document alone is all the work of its micro-batch, and no micro-batch can be lighter.
/// assert_eq!(packing.assignment, [0, 1, 1, 1, 1]);
/// assert!(packing.max_cost() == packing.lower_bound());
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn pack<'a>(lengths: &Lengths, options: &PackOptions, costs: impl Into<Pricing<'a>>) -> Result<Packing> {
    let costs = costs.into();
    let PackOptions { max_tokens, method, global_batches, .. } = *options;
    check_micro_batches(options.num_micro_batches)?;
    check_range("max_tokens", i64::from(max_tokens), 1, MAX_TOKENS)?;
    if global_batches != 1 && method != Method::FixedLength {
        let requirement = "other than 1 need method=\"fixed_length\"";
        return Err(Error::Combination { argument: "global_batches", requirement });
    }
    let most_batches = (MAX_MICRO_BATCHES / options.num_micro_batches) as i64;
    check_range("global_batches", saturating_i64(global_batches), 1, most_batches)?;
    costs.check(lengths)?;
    let num_micro_batches = options.num_micro_batches * global_batches;
    let keeps_whole = !matches!(method, Method::Original | Method::FixedLength);
    if keeps_whole {
        check_fit(lengths, max_tokens)?;
    }
    let cost_model = match costs {
        Pricing::Model(cost_model) => cost_model,
        Pricing::Given(given) => {
            let packing = pack_given(lengths, num_micro_batches, max_tokens, method, given)?;
            return finish(packing, lengths, options, !given.limits().iter().all(Option::is_none));
        }
    };
    let packing = match method {
        Method::Original => original::pack(lengths, num_micro_batches, max_tokens, costs),
        Method::FixedLength => {
            Packing { global_batches, ..fixed_length::pack(lengths, num_micro_batches, max_tokens, cost_model) }
        }
        Method::VarLength => var_length::pack(lengths, num_micro_batches, max_tokens, cost_model),
        Method::Refined => refined::pack(lengths, num_micro_batches, max_tokens, cost_model),
    };
    finish(packing, lengths, options, false)
}

/// Packs documents whose costs are given, so that only their tokens and these costs are known.
fn pack_given(
    lengths: &Lengths,
    num_micro_batches: usize,
    max_tokens: i32,
    method: Method,
    costs: &DocumentCosts,
) -> Result<Packing> {
    let priced = Priced { lengths, costs, num_micro_batches, max_tokens, max_documents: None, cost_model: None };
    let placed = match method {
        Method::Original if costs.limits().iter().any(Option::is_some) => {
            let requirement = "method=\"original\" cuts only by max_tokens, so it could exceed them";
            return Err(Error::Combination { argument: "limits", requirement });
        }
        Method::Original => return Ok(original::pack(lengths, num_micro_batches, max_tokens, costs.into())),
        Method::VarLength => priced.level(priced.place()),
        Method::Refined => priced.refine_from(priced.place()),
        Method::FixedLength => {
            let requirement = "goes by lengths alone: given costs need \"var_length\", \"refined\" or \"original\"";
            return Err(Error::Combination { argument: "method", requirement });
        }
    };
    Ok(priced.packing(placed, Some(method), |index| Piece::whole(index, lengths[index])))
}

fn finish(packing: Packing, lengths: &Lengths, options: &PackOptions, limited: bool) -> Result<Packing> {
    match first_left_over(&packing) {
        Some(first) if options.leftover == Leftover::Error => {
            Err(left_over(first, &packing, lengths, options, limited))
        }
        _ => Ok(packing),
    }
}

/// Among the documents that were left over, the one that arrived first.
fn first_left_over(packing: &Packing) -> Option<usize> {
    packing.leftover.iter().map(|piece| piece.id as usize).min()
}

fn left_over(index: usize, packing: &Packing, lengths: &Lengths, options: &PackOptions, limited: bool) -> Error {
    let micro_batches = packing.num_micro_batches();
    let enough = enough_tokens(lengths, micro_batches as u64, options.method);
    let all = "num_micro_batches=None takes as many as hold them all";
    let (enough, whole) = match enough {
        _ if limited => (None, Some("num_micro_batches=None takes as many as hold them all, also within limits")),
        // The advice `num_micro_batches=None` is no use here: several global batches need a number.
        _ if options.global_batches != 1 => (Some(enough), None),
        ..=MAX_TOKENS => (Some(enough), Some(all)),
        _ => (None, Some(all)),
    };
    Error::LeftOver {
        documents: packing.leftover.len(),
        all: lengths.len(),
        tokens: packing.leftover.iter().map(|piece| i64::from(piece.length)).sum(),
        micro_batches,
        given: format!("max_tokens = {}", options.max_tokens),
        index,
        value: i64::from(lengths[index]),
        enough,
        whole,
    }
}

/// A `max_tokens` with which nothing is left over; the least such number for methods that cut documents.
///
/// A document that is kept whole is left over only if the micro-batch with the fewest tokens has no room for it. That
/// micro-batch has at most the mean of the other documents' tokens.
fn enough_tokens(lengths: &Lengths, micro_batches: u64, method: Method) -> i64 {
    let total = lengths.total() as u64;
    let enough = match method {
        Method::Original | Method::FixedLength => total.div_ceil(micro_batches),
        _ => {
            let longest = lengths.iter().copied().max().unwrap_or(0) as u64;
            longest + (total - longest) / micro_batches
        }
    };
    enough as i64
}

pub(crate) fn check_fit(lengths: &[i32], max_tokens: i32) -> Result<()> {
    if lengths.iter().copied().max().unwrap_or(0) <= max_tokens {
        return Ok(());
    }
    let index = lengths.iter().position(|&length| length > max_tokens).unwrap_or(0);
    Err(Error::TooLong {
        argument: "lengths",
        index,
        value: i64::from(lengths[index]),
        given: format!("max_tokens = {max_tokens}"),
        limit: i64::from(max_tokens),
        hint: "; split it first (split_documents), or raise max_tokens",
    })
}

/// [`pack`] with the smallest number of micro-batches that leaves nothing over.
///
/// # Arguments
/// * `multiple_of` - the number of micro-batches is a multiple of it (the number of data-parallel ranks).
/// * `options` - `num_micro_batches` and `leftover` are ignored; `global_batches` must be 1.
///
/// # Returns
/// The plan of [`pack`] for that number. With `multiple_of` micro-batches fewer, documents are left over. Without
/// documents: `multiple_of` empty micro-batches.
///
/// # Errors
/// The errors of [`pack`]; [`Error::OutOfRange`] also if more than [`MAX_MICRO_BATCHES`] would be needed.
///
/// # Complexity
/// O(log n) times the time of [`pack`]; usually [`pack`] runs once, if the bound from the tokens and from the documents
/// longer than half of `max_tokens` is enough.
///
/// # Example
/// ```
/// use wlb_core::{CostModel, Leftover, Lengths, Mask, Method, PackOptions, pack_whole};
///
/// let lengths = Lengths::new("lengths", &[700, 600, 300, 200, 100])?;
/// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
/// let (method, leftover) = (Method::VarLength, Leftover::Error);
/// let options = PackOptions { num_micro_batches: 1, max_tokens: 1000, method, global_batches: 1, leftover };
/// // Two micro-batches hold the 1,900 tokens. With `multiple_of = 4` there are four, one for each of four ranks.
/// assert_eq!(pack_whole(&lengths, 2, &options, &cost)?.num_micro_batches(), 2);
/// assert_eq!(pack_whole(&lengths, 4, &options, &cost)?.num_micro_batches(), 4);
/// # Ok::<(), wlb_core::Error>(())
/// ```
pub fn pack_whole<'a>(
    lengths: &Lengths,
    multiple_of: usize,
    options: &PackOptions,
    costs: impl Into<Pricing<'a>>,
) -> Result<Packing> {
    let costs = costs.into();
    check_range("multiple_of", saturating_i64(multiple_of), 1, MAX_MICRO_BATCHES as i64)?;
    check_range("max_tokens", i64::from(options.max_tokens), 1, MAX_TOKENS)?;
    if options.global_batches != 1 {
        let requirement = "other than 1 need num_micro_batches";
        return Err(Error::Combination { argument: "global_batches", requirement });
    }
    let pack_into = |multiples: usize| {
        // A number that is too large is refused by `pack`.
        let num_micro_batches = multiples.saturating_mul(multiple_of);
        let leftover = Leftover::Return;
        pack(lengths, &PackOptions { num_micro_batches, leftover, ..options.clone() }, costs)
    };
    let held = options.max_tokens as u64 * multiple_of as u64;
    let mut least = (lengths.total() as u64).div_ceil(held).max(1) as usize;
    if !matches!(options.method, Method::Original | Method::FixedLength) {
        // No two of these documents fit together, and this method does not cut them.
        let apart = lengths.iter().filter(|&&length| length > options.max_tokens / 2).count();
        least = least.max(apart.div_ceil(multiple_of));
    }

    if let Pricing::Given(given) = costs {
        let needed =
            given.limits().iter().enumerate().filter_map(|(column, limit)| Some(given.sums()[column] / (*limit)?));
        // A little less, since a rounded sum may be too large.
        let micro_batches = needed.fold(0.0, f64::max) * (1.0 - 1e-9);
        least = least.max((micro_batches / multiple_of as f64).ceil() as usize);
    }

    let most = MAX_MICRO_BATCHES / multiple_of;
    let (_, best) =
        fewest(least, most, |multiples| Ok(Some(pack_into(multiples)?).filter(|it| it.leftover.is_empty())))?;
    Ok(best)
}
