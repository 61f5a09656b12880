//! Selects the rates that explain measured times, and finds the terms that these times cannot tell apart.
//!
//! A term is kept if without it the times are explained worse than chance would do. For each term that is not kept, the
//! times say one of two things. Either the term is small: its cost cannot be seen. Or it could be large, because other
//! terms explain the same times: if all micro-batches have the same number of tokens, a cost per token and a cost per
//! micro-batch cannot be told apart. Sharing a cost out between two such terms would be a guess, and wrong as soon as
//! the micro-batches change. So one term gets the whole cost, and the terms are reported as merged.

use crate::error::{Error, Result};

use super::least_squares::System;
use super::robust::{Agreement, agree, median, predict, weighted};

/// Standard deviations by which the times must be explained worse without a term: noise alone stays below in 95 % of
/// cases.
const SUPPORT: f64 = 2.0;

/// A term that may hold more than this share of all time without being seen counts as merged with the terms in its
/// place.
const UNSEEN: f64 = 0.05;

/// Columns of length 1: the least factor with which a column must stand for another one to be merged with it.
const PARTNER: f64 = 0.25;

/// One row in this many is held out.
const HELD_OUT: usize = 5;

/// Amounts of work in each micro-batch, of which a time may be the sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    /// The term's name.
    pub name: String,
    /// Amount of the term in each micro-batch.
    pub work: Vec<f64>,
}

/// One term of a fit.
#[derive(Clone, Debug, PartialEq)]
pub struct FittedTerm {
    /// Name of the term.
    pub name: String,
    /// Seconds for one unit of the term's work; 0 for a term that was not kept.
    pub rate: f64,
    /// Share of all time that the term takes.
    pub share: f64,
    /// Standard error of that share: about a third of all fits are off by more.
    pub share_error: f64,
}

/// Rates that explain measured times.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// In the order of the columns.
    pub terms: Vec<FittedTerm>,
    /// Terms that could not be told apart, each group in the order of the columns. Only terms that were kept have a
    /// rate; the other terms of a group have 0.
    pub merged: Vec<Vec<String>>,
    /// Median of `|predicted - measured| / measured` over the rows.
    pub residual: f64,
    /// Median error over held-out rows, predicted by a fit to the other rows.
    pub held_out_error: f64,
    /// Number of held-out rows.
    pub held_out: usize,
    /// Rows that get no weight because the other rows contradict them.
    pub outliers: Vec<usize>,
}

/// Rates from measured times, none of them negative: see [`agree`] for what is minimised.
///
/// # Arguments
/// * `columns` - terms in order of preference: of terms that cannot be told apart, the last is given up.
/// * `seconds` - measured time of each micro-batch.
///
/// # Errors
/// [`Error::Mismatch`]; [`Error::Entry`] naming a time that is not a finite number above 0; [`Error::Number`] where
/// there are too few rows.
///
/// # Complexity
/// O(n k^2) for `n` rows and `k` columns, some hundred times.
pub fn fit_rates(columns: &[Column], seconds: &[f64]) -> Result<Fit> {
    for column in columns {
        if column.work.len() != seconds.len() {
            let (found, expected) = (seconds.len(), column.work.len());
            return Err(Error::Mismatch { argument: "seconds", found, other: "micro_batches", expected });
        }
    }
    let wrong = |&time: &f64| !(time.is_finite() && time > 0.0);
    if let Some(index) = seconds.iter().position(wrong) {
        let (argument, requirement) = ("seconds", "must be a finite number above 0");
        return Err(Error::Entry { argument, index, value: seconds[index], requirement });
    }
    let least = least_rows(columns.len());
    if seconds.len() < least {
        let requirement = "rows are too few: a fit needs two for each term, and at least eight";
        return Err(Error::Number { argument: "micro_batches", value: seconds.len() as f64, requirement });
    }
    let work: Vec<Vec<f64>> = columns.iter().map(|column| column.work.clone()).collect();
    let Selected { kept, merged, agreement } = select(&work, seconds);

    let system = weighted(&work, &agreement, seconds);
    let total: f64 = agreement.predicted.iter().sum();
    let terms = columns.iter().enumerate().map(|(at, column)| {
        let amount: f64 = column.work.iter().sum();
        let others: Vec<usize> = kept.iter().copied().filter(|&other| other != at).collect();
        let rate = agreement.rates[at];
        let share_error = share_error(&system, at, &others, agreement.noise, amount, total);
        FittedTerm { name: column.name.clone(), rate, share: rate * amount / total, share_error }
    });
    let name = |&at: &usize| columns[at].name.clone();
    let errors = |predicted: &[f64], rows: &[usize]| {
        median(rows.iter().map(|&row| (predicted[row] - seconds[row]).abs() / seconds[row]).collect())
    };
    let all: Vec<usize> = (0..seconds.len()).collect();
    let (seen, unseen) = split(seconds.len());
    let part = |values: &[f64]| -> Vec<f64> { seen.iter().map(|&row| values[row]).collect() };
    let seen_work: Vec<Vec<f64>> = work.iter().map(|column| part(column)).collect();
    let blind = select(&seen_work, &part(seconds)).agreement;
    Ok(Fit {
        terms: terms.collect(),
        merged: merged.iter().map(|group| group.iter().map(name).collect()).collect(),
        residual: errors(&predict(&work, &agreement.rates), &all),
        held_out_error: errors(&predict(&work, &blind.rates), &unseen),
        held_out: unseen.len(),
        outliers: all.into_iter().filter(|&row| agreement.weights[row] == 0.0).collect(),
    })
}

/// Rows that a fit of this number of terms needs.
pub fn least_rows(terms: usize) -> usize {
    (2 * terms).max(8)
}

struct Selected {
    kept: Vec<usize>,
    /// Groups of columns that could not be told apart.
    merged: Vec<Vec<usize>>,
    agreement: Agreement,
}

/// Gives up terms that the times do not need, the last column first, and finds the terms that take their place.
fn select(work: &[Vec<f64>], seconds: &[f64]) -> Selected {
    let mut kept: Vec<usize> = (0..work.len()).filter(|&at| work[at].iter().any(|&amount| amount > 0.0)).collect();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let all = agree(work, &kept, seconds);
    let system = weighted(work, &all, seconds);
    let total: f64 = all.predicted.iter().sum();
    for column in (1..work.len()).rev() {
        let others: Vec<usize> = kept.iter().copied().filter(|&other| other != column).collect();
        if others.len() == kept.len() || others.is_empty() {
            continue;
        }
        let worse = system.squares(&others) - system.squares(&kept);
        if worse > (SUPPORT * all.noise) * (SUPPORT * all.noise) {
            continue;
        }
        let amount: f64 = work[column].iter().sum();
        if SUPPORT * share_error(&system, column, &others, all.noise, amount, total) > UNSEEN {
            let (_, gives) = system.apart(column, &others);
            let most = gives.iter().map(|share| share.abs()).fold(0.0, f64::max);
            let partner = |&(_, share): &(usize, f64)| share.abs() >= PARTNER.min(most);
            let shares = others.iter().copied().zip(gives.iter().copied());
            groups.push([column].into_iter().chain(shares.filter(partner).map(|(other, _)| other)).collect());
        }
        kept = others;
    }
    let agreement = agree(work, &kept, seconds);
    Selected { kept, merged: united(groups), agreement }
}

/// Standard error of a term's share of all time, beside the terms `others`. Infinite if the others can replace the
/// term.
fn share_error(system: &System, column: usize, others: &[usize], noise: f64, amount: f64, total: f64) -> f64 {
    let apart = system.apart(column, others).0 * system.norm(column);
    if amount == 0.0 {
        0.0
    } else if apart > 1e-9 * system.norm(column) {
        noise / apart * amount / total
    } else {
        f64::INFINITY
    }
}

/// Unites groups that have a member in common; members are in ascending order.
fn united(groups: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
    let mut united: Vec<Vec<usize>> = Vec::new();
    for mut group in groups {
        united.retain(|other| {
            let common = other.iter().any(|at| group.contains(at));
            if common {
                group.extend(other);
            }
            !common
        });
        group.sort_unstable();
        group.dedup();
        united.push(group);
    }
    united.sort_unstable();
    united
}

/// Rows for the fit and held-out rows. The choice depends only on the number of rows and follows no pattern.
fn split(rows: usize) -> (Vec<usize>, Vec<usize>) {
    // SplitMix64's finalizer mixes the index, so that neighbours and rows at any fixed distance go to either side.
    let mixed = |row: &usize| {
        let mut bits = (*row as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    };
    let mut order: Vec<usize> = (0..rows).collect();
    order.sort_by_key(mixed);
    let mut unseen = order.split_off(rows - rows / HELD_OUT);
    order.sort_unstable();
    unseen.sort_unstable();
    (order, unseen)
}
